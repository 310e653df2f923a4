"""Mistakes of a user in real processes: exit codes, and messages that are printed once for all ranks."""

from __future__ import annotations

import json
import pathlib

import pytest
from program import Run, doctor, forked_doctor, torchrun
from support.places import ROOT

from fsdp_doctor.matrix.selection import Selection, select

_PROBE = ("probe", "--device", "cpu")
_ONE_CASE = (*_PROBE, "--case", "fsdp2/none/unstaged/state_dict")


def _complaint(stderr: str) -> str:
    """The doctor's sentences, without what torchrun says around them."""
    lines = [line for line in stderr.splitlines() if line.startswith("fsdp-doctor: ")]
    assert len(lines) == 1, stderr
    return lines[0]


def test_a_model_type_unknown_to_transformers_is_named_in_a_usage_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    done = forked_doctor(*_PROBE, "--model", str(tmp_path), "--strategy", "fsdp2", "--offload", "none")
    assert done.code == 2, done.stderr
    assert "no_such_model" in _complaint(done.stderr)


def test_usage_errors_are_told_once_however_many_ranks_there_are() -> None:
    done = torchrun("--nproc-per-node=3", "-m", "fsdp_doctor", *_PROBE, "--offload", "polcy")
    assert done.code == 1
    assert _complaint(done.stderr)


def test_a_device_that_torch_does_not_see_is_exit_code_3() -> None:
    done = forked_doctor("probe", "--device", "cuda", "--case", "fsdp2/none/unstaged/state_dict")
    if done.code == 0:
        pytest.skip("this machine has two CUDA devices")
    assert done.code == 3, done.stderr
    assert "cuda" in _complaint(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_torch_that_is_too_old_is_exit_code_3(tmp_path: pathlib.Path) -> None:
    metadata = tmp_path / "torch-2.5.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    done = doctor(*_ONE_CASE, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.code == 3
    assert "torch 2.5.1 is too old; fsdp-doctor needs torch 2.6 or newer" in _complaint(done.stderr)


_CANNOT_BE_BUILT: dict[str, dict[str, tuple[str, ...]]] = {
    "hsdp on two ranks": {"strategy": ("fsdp2",), "sharding": ("hsdp",)},
    "device-only on the cpu": {"strategy": ("fsdp2",), "backend": ("device-only",)},
    "unpinned without a policy": {"strategy": ("fsdp2",), "offload": ("none",), "pinning": ("unpinned",)},
    "nonblocking under a policy": {"strategy": ("fsdp2",), "offload": ("policy",), "transfer": ("nonblocking",)},
    "fsdp1 on the cpu": {"strategy": ("fsdp1",), "offload": ("none",)},
}


def _ids(axes: dict[str, tuple[str, ...]]) -> list[str]:
    return [case.id for case in select(Selection(axes=axes, methods=("state_dict",)))]


@pytest.fixture(scope="module")
def nothing_can_run() -> Run:
    ids = [case_id for axes in _CANNOT_BE_BUILT.values() for case_id in _ids(axes)]
    return forked_doctor(*_PROBE, *(word for case_id in ids for word in ("--case", case_id)))


def test_a_selection_of_which_nothing_can_run_is_exit_code_3(nothing_can_run: Run) -> None:
    assert nothing_can_run.code == 3
    assert "torch's FSDP1 needs an accelerator" in nothing_can_run.stdout
    assert "none of the selected cases could be run here" in _complaint(nothing_can_run.stderr)


@pytest.mark.parametrize("axes", _CANNOT_BE_BUILT.values(), ids=_CANNOT_BE_BUILT)
def test_a_combination_that_cannot_be_built_is_unsupported_with_a_reason(
    nothing_can_run: Run, axes: dict[str, tuple[str, ...]]
) -> None:
    rows = {row[0]: row[1:] for row in (line.split("\t") for line in nothing_can_run.stdout.splitlines())}
    assert _ids(axes)
    for case_id in _ids(axes):
        assert (rows[case_id][0], len(rows[case_id])) == ("unsupported", 4), rows[case_id]


def test_bad_input_is_told_on_stderr_alone_and_leaves_no_process() -> None:
    done = forked_doctor(*_PROBE, "--method", "no_such_module:function")
    assert (done.code, done.stdout, done.left) == (2, "", []), done.stderr
    assert "No module named 'no_such_module'" in _complaint(done.stderr)
    assert "Traceback" not in done.stderr
