"""A case that crashes, hangs or dies gets the right verdict and takes no other case's result along."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_methods

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict")
_FAULTS = (
    "rank_1_raises_while_rank_0_waits",
    "rank_0_raises_while_rank_1_waits",
    "rank_1_raises_while_rank_0_succeeds",
    "killed",
    "segmentation_fault",
    "exits_at_once_with_0",
    "sys_exit_3",
    "eats_memory",
    "floods_stdout",
)
_HANGS = ("endless_loop", "collective_of_one_rank", "stopped", "ignores_sigterm_as_its_child_does")


def _run(directory: pathlib.Path, faults: tuple[str, ...], *limits: str) -> Run:
    """A healthy method after each fault."""
    methods = [name for number, fault in enumerate(faults, 1) for name in (fault, f"healthy_{number}")]
    return probe(directory, *_ONE_SCENARIO, *user_methods(*(f"processes:{name}" for name in methods)), *limits)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("faulty"), _FAULTS, "--grace", "2", "--host-memory", "1536MiB")


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Each costs its deadline, so it is a short one."""
    return _run(tmp_path_factory.mktemp("hanging"), _HANGS, "--timeout", "5", "--grace", "2")


@pytest.mark.parametrize(
    ("fault", "kind", "ranks", "reason"),
    [
        ("rank_1_raises_while_rank_0_waits", "crash", (1,), "rank 1: ValueError: planted on rank 1"),
        ("rank_0_raises_while_rank_1_waits", "crash", (0,), ""),
        ("rank_1_raises_while_rank_0_succeeds", "crash", (1,), ""),
        ("killed", "died", (1,), "rank 1: ended with SIGKILL"),
        ("segmentation_fault", "died", (1,), "rank 1: ended with SIGSEGV"),
        ("exits_at_once_with_0", "died", (1,), "rank 1: ended with exit code 0"),
        ("sys_exit_3", "died", (0,), "rank 0: ended with exit code 3"),
        ("endless_loop", "hang", (1,), "in stage extract for 5 s: rank 0 waited in all_reduce; rank 1 was busy"),
        ("collective_of_one_rank", "hang", (0,), ""),
        ("stopped", "hang", (1,), "rank 1 was stopped by a signal"),
        ("ignores_sigterm_as_its_child_does", "hang", (0, 1), ""),
        ("eats_memory", "oom", (1,), "the limit is 1536 MiB"),
        ("floods_stdout", "ok", (), ""),
    ],
)
def test_each_fault_gets_its_verdict_names_its_rank_and_says_what_happened(
    faulty: Run, hanging: Run, fault: str, kind: str, ranks: tuple[int, ...], reason: str
) -> None:
    verdict = (hanging if fault in _HANGS else faulty).result(f":{fault}").verdict
    assert (verdict.kind, verdict.ranks) == (kind, ranks), verdict
    assert reason in verdict.reason


def test_no_fault_takes_another_case_along(faulty: Run, hanging: Run) -> None:
    for run, faults in ((faulty, _FAULTS), (hanging, _HANGS)):
        assert run.report is not None
        assert run.report.complete
        others = {result.id: result.verdict.kind for result in run.report.results if ":healthy" in result.id}
        assert len(others) == len(faults)
        assert set(others.values()) == {"ok"}, others
        assert run.kind("/state_dict") == "ok"


def test_bad_verdicts_are_exit_code_1_and_no_process_outlives_the_run(faulty: Run, hanging: Run) -> None:
    for run in (faulty, hanging):
        assert (run.code, run.left) == (1, [])


def test_a_rank_that_waited_for_the_one_that_raised_is_told_apart(faulty: Run) -> None:
    also = faulty.result(":rank_1_raises_while_rank_0_waits").verdict.also
    assert any("rank 0 waited in all_reduce" in text for text in also), also


@pytest.mark.parametrize("fault", ["endless_loop", "stopped", "ignores_sigterm_as_its_child_does"])
def test_a_hang_has_the_python_stack_of_every_rank(hanging: Run, fault: str) -> None:
    for rank in (0, 1):
        assert f"in {fault}" in hanging.rank(f":{fault}", rank).stack


def test_a_rank_that_got_through_waits_for_the_one_that_did_not(hanging: Run) -> None:
    assert "in collective_of_one_rank" in hanging.rank(":collective_of_one_rank", 0).stack
    assert "in agree" in hanging.rank(":collective_of_one_rank", 1).stack


def test_stacks_and_tracebacks_name_files_as_imports_do(faulty: Run, hanging: Run) -> None:
    assert 'File "faults/processes.py"' in hanging.rank(":endless_loop", 1).stack
    record = faulty.rank(":rank_1_raises_while_rank_0_waits", 1).record
    assert record is not None
    assert record.failure is not None
    assert 'File "faults/processes.py"' in record.failure.traceback


def test_a_segmentation_fault_leaves_its_stack_in_the_output(faulty: Run) -> None:
    assert "Segmentation fault" in faulty.rank(":segmentation_fault", 1).output


def test_what_a_case_prints_does_not_reach_stdout(faulty: Run) -> None:
    assert "xxxx" not in faulty.stdout
    assert len(faulty.stdout.splitlines()) == 2 * len(_FAULTS) + 1


def test_half_a_record_is_lost_and_the_doctors_own_fault(tmp_path: pathlib.Path) -> None:
    methods = user_methods("processes:writes_half_a_record", "processes:healthy")
    run = probe(tmp_path, *_ONE_SCENARIO, *methods)
    verdict = run.result(":writes_half_a_record").verdict
    assert (verdict.kind, verdict.ranks) == ("lost", (1,))
    assert "half a record" in verdict.reason
    assert run.kind(":healthy") == "ok"
    assert run.kind("/state_dict") == "ok"
    assert run.code == 4
    assert run.left == []


def test_a_method_that_waits_for_an_external_service_is_not_a_hang(tmp_path: pathlib.Path) -> None:
    run = probe(tmp_path, *_ONE_SCENARIO, *user_methods("processes:healthy", "processes:waits_8_seconds_for_a_service"))
    result = run.result(":waits_8_seconds_for_a_service")
    assert result.verdict.kind == "ok", result.verdict
    assert result.wall_seconds > 8
