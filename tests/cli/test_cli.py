"""Tests that what a user can get wrong is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import pathlib

import pytest
from support.inside import doctor

from fsdp_doctor.matrix.axes import OFFLOADS

_PROBE = ("probe", "--device", "cpu")
_ONE_CASE = (*_PROBE, "--case", "fsdp2/none/unstaged/state_dict")


def _complaint(stderr: str) -> str:
    """The doctor's sentences, without what torchrun says around them."""
    lines = [line for line in stderr.splitlines() if line.startswith("fsdp-doctor: ")]
    assert len(lines) == 1, stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--offload", "polcy"], "'--offload': 'polcy' is not one of none, param"),
        (["--case", "fsdp2/policy/stagd/state_dict"], "'stagd' is not a value of any axis (did you mean staged"),
        (["--case", "fsdp2/policy/staged/state_dct"], "there is no method 'state_dct' (did you mean state_dict"),
        (["--case", "fsdp2/state_dict"], "has no value for offload and staging"),
        (["--method", "nonsense"], "there is no method 'nonsense'"),
        (["--method", "no_such_module:function"], "No module named 'no_such_module'"),
        (["--method", "json:dmps"], "has no dmps (did you mean dumps"),
        (["-k", "policy and and staged"], "has 'and', but a word is expected"),
        (["-k", "(policy"], "a parenthesis that is not closed"),
        (["--model", "no/such/directory"], "neither a built-in model (qwen3"),
        (["--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B config.json"),
        (["--timeout", "0"], "'--timeout'"),
        (["--nproc", "0"], "'--nproc'"),
        (["--host-memory", "much"], "'--host-memory': 'much' is not a size"),
        (["--device-memory", "much"], "'--device-memory': 'much' is not a size"),
        (["--device", "tpu"], "'--device': 'tpu' is not one of auto, cuda, xpu, cpu"),
        (["--format", "pdf"], "'pdf' is not one of auto, table, lines, json"),
        (["--resume"], "give --json FILE"),
        (["--json", "no/such/directory/report.json"], "cannot write no/such/directory/report.json: No such file"),
        (["--markdown", "/proc/nothing"], "cannot write /proc/nothing"),
        (["--last-failed", "no-such-report.json"], "cannot read the report no-such-report.json: No such file"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_sentence(arguments: list[str], sentence: str) -> None:
    done = doctor(*_PROBE, *arguments)
    assert done.code == 2, done.stderr
    assert sentence in _complaint(done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no config.json"),
        ("{broken", "cannot read config.json"),
        ("{}", "has no model_type"),
        ("[]", "has no model_type"),
    ],
)
def test_a_model_directory_that_is_none_is_exit_code_2(
    tmp_path: pathlib.Path, content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    done = doctor(*_PROBE, "--model", str(tmp_path))
    assert done.code == 2
    assert sentence in _complaint(done.stderr)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "it is not JSON"),
        ("{}", "its 'schema' is not 'fsdp-doctor/report'"),
        (json.dumps({"schema": "fsdp-doctor/report", "schema_version": 99}), "upgrade fsdp-doctor"),
        (json.dumps({"schema": "fsdp-doctor/report", "schema_version": 1}), "a damaged report"),
    ],
)
def test_a_report_that_is_none_of_ours_is_exit_code_2(tmp_path: pathlib.Path, content: str, sentence: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(content)
    for command in (
        ["report", "show", str(file)],
        [*_PROBE, "--last-failed", str(file)],
        [*_PROBE, "--expect", str(file)],
    ):
        done = doctor(*command)
        assert done.code == 2, done.stderr
        assert sentence in _complaint(done.stderr)


def test_an_unknown_option_is_exit_code_2() -> None:
    assert doctor("probe", "--no-such-option").code == 2


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "contradict each other"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "are not all numbers"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
    ],
)
def test_a_wrong_world_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    # A rank that is not the first gives it two seconds to say what is wrong.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if len(variables) == 4 else {}
    done = doctor(*_ONE_CASE, env={**variables, **address})
    assert done.code == 3, done.stderr
    assert sentence in _complaint(done.stderr)


def test_a_selection_of_nothing_is_exit_code_3() -> None:
    done = doctor(*_PROBE, "-k", "nothing_has_this")
    assert done.code == 3
    assert "no case is selected" in _complaint(done.stderr)


def test_the_default_matrix_has_at_least_250_cases_and_every_verl_combination() -> None:
    rows = json.loads(doctor("list", "--json").stdout)
    assert len(rows) >= 250
    assert {row["offload"] for row in rows} >= {str(offload) for offload in OFFLOADS if offload.way is None}
    assert {row["strategy"] for row in rows} == {"fsdp1", "fsdp2"}
    assert {row["staging"] for row in rows} == {"staged", "unstaged"}


def test_a_misspelt_command_of_a_group_is_answered_with_the_intended_command() -> None:
    complaint = _complaint(doctor("report", "dif", "a.json", "b.json").stderr)
    assert "'dif'" in complaint
    assert "'diff'" in complaint
