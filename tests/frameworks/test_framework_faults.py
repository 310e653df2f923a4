"""A framework of another version, or one that does what no framework should, breaks its case alone."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from program import Run, start_probe
from support.emulation import needs_emulation
from support.places import ROOT, TESTS

pytest.importorskip("accelerate", reason="install fsdp-doctor[frameworks-test]")

_SCENARIO = "accelerate:fsdp2/none/sharded"
_LACKING = "accelerate:fsdp1/none/sharded/prepare"


def _probe(directory: pathlib.Path, overlay: str, *arguments: str, **variables: str) -> Run:
    needs_emulation()
    path = os.pathsep.join(map(str, (TESTS / "faults" / overlay, ROOT, TESTS)))
    json_file = directory / "report.json"
    env = {"PYTHONPATH": path, **variables}
    return start_probe(json_file, *arguments, device="emulated", env=env).wait(json_file)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs an accelerate that lacks a method, exits in another, and so on."""
    methods = ("get_state_dict", "save_model", "save_state.merge_fsdp_weights", "load_state", "load_state.fresh")
    cases = [word for method in methods for word in ("--case", f"{_SCENARIO}/{method}")] + ["--case", _LACKING]
    directory = tmp_path_factory.mktemp("unlike")
    return _probe(directory, "unlike_accelerate", *cases, "--timeout", "5", https_proxy="http://127.0.0.1:9")


def test_a_name_that_the_installed_version_lacks_is_told_with_the_version(unlike: Run) -> None:
    import accelerate

    verdict = unlike.result("/get_state_dict").verdict
    assert verdict.kind == "unsupported", verdict
    assert f"accelerate {accelerate.__version__}" in verdict.reason
    assert "has no attribute 'get_state_dict'" in verdict.reason


def test_a_missing_package_that_is_imported_late_is_named(unlike: Run) -> None:
    verdict = unlike.result(_LACKING).verdict
    assert verdict.kind == "unsupported", verdict
    assert "No module named 'a_package_of_fsdp1'" in verdict.reason


def test_sys_exit_is_a_process_that_ended(unlike: Run) -> None:
    verdict = unlike.result("/save_model").verdict
    assert verdict.kind == "died", verdict
    assert "exit code 7" in verdict.reason


def test_printing_without_end_is_a_hang_with_its_stack(unlike: Run) -> None:
    result = unlike.result("/save_state.merge_fsdp_weights")
    assert result.verdict.kind == "hang", result.verdict
    assert "_prints_without_end" in result.ranks[0].stack


def test_what_comes_after_goes_on(unlike: Run) -> None:
    assert unlike.kind("sharded/load_state") == "ok", unlike.result("sharded/load_state").verdict
    assert unlike.kind("/load_state.fresh") == "ok", unlike.result("/load_state.fresh").verdict


def test_a_process_in_a_separate_session_does_not_outlive_the_run(unlike: Run) -> None:
    assert unlike.left == []


def test_a_configuration_that_was_ignored_is_unsupported_with_each_fact_that_differs(tmp_path: pathlib.Path) -> None:
    import accelerate

    ignored, built = "accelerate:fsdp2/offload/sharded/get_state_dict", "accelerate:fsdp1-orig/none/full/get_state_dict"
    run = _probe(tmp_path, "deaf_accelerate", "--case", ignored, "--case", built)
    assert run.kind(built) == "ok", run.result(built).verdict
    verdict = run.result(ignored).verdict
    assert verdict.kind == "unsupported", verdict
    for fact in (
        accelerate.__version__,
        "fsdp1-orig instead of fsdp2",
        "offload policy",
        "full instead of sharded state dicts",
    ):
        assert fact in verdict.reason


def test_nothing_is_written_to_the_home_directory() -> None:
    assert not (pathlib.Path.home() / "written_by_accelerate").exists()


def test_list_needs_neither_torch_nor_the_framework(tmp_path: pathlib.Path) -> None:
    from program import run

    program = (
        "import sys; sys.modules['torch'] = sys.modules['accelerate'] = sys.modules['transformers'] = None; "
        "from fsdp_doctor.cli.app import main; sys.argv[1:] = ['list', '--framework', 'accelerate,trainer']; main()"
    )
    done = run(sys.executable, "-c", program)
    assert done.code == 0, done.stderr
    assert f"{_SCENARIO}/load_state.fresh" in done.stdout.splitlines()
    assert "trainer:fsdp2/none/full/save_model" in done.stdout.splitlines()
