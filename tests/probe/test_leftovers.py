"""What a path leaves behind in the process decides no later case."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe

# Every case of a scenario before its first training step builds it anew, and then trains.
_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--phase", "fresh")
_UNDONE = (
    "grad_mode",
    "grad_mode_on_rank_1",
    "default_dtype",
    "default_device",
    "deterministic_mode",
    "autocast",
    "random_numbers",
    "working_directory",
    "environment",
    "signal_handler",
    "blocked_signals",
    "timer",
    "garbage_collection",
)
_RETIRED = (
    "inference_mode",
    "signal_that_asks_for_the_stack",
    "descriptors",
    "closed_stdout",
    "thread",
    "thread_on_rank_1",
    "process_group",
)
_HARMLESS = (
    "deterministic_mode",
    "random_numbers",
    "working_directory",
    "environment",
    "signal_handler",
    "blocked_signals",
    "timer",
    "garbage_collection",
    "descriptors",
    "thread",
    "next_build",
)


def _probe(directory: pathlib.Path, leftovers: tuple[str, ...], device: str) -> Run:
    """One run of every leftover, a path that looks for it after each."""
    names = ["looks", *(name for number, left in enumerate(leftovers) for name in (left, f"looks_{number}"))]
    paths = [word for name in names for word in ("--path", f"faults.leftovers:{name}")]
    return probe(directory, *_ONE_SCENARIO, *paths, "-k", "leftovers", device=device)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _probe(tmp_path_factory.mktemp("cpu"), (*_UNDONE, *_RETIRED, "next_build"), device="cpu")


@pytest.fixture(scope="module")
def on_a_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _probe(tmp_path_factory.mktemp("emulated"), ("stream", "device", "random_numbers"), device="emulated")


def _verdicts_after(run: Run) -> dict[str, str]:
    assert run.report is not None, run.stderr
    assert run.report.complete
    looks = {result.id: result.verdict for result in run.report.results if ":looks" in result.id}
    return {name: verdict.reason or verdict.kind for name, verdict in looks.items() if verdict.kind != "ok"}


def test_no_leftover_reaches_the_next_case(on_the_cpu: Run) -> None:
    assert _verdicts_after(on_the_cpu) == {}


def test_no_case_is_skipped_for_what_another_left(on_the_cpu: Run) -> None:
    assert on_the_cpu.report is not None
    assert on_the_cpu.report.of_kind("skipped") == 0


def test_the_devices_stream_index_and_random_numbers_are_put_back(on_a_device: Run) -> None:
    assert _verdicts_after(on_a_device) == {}


@pytest.mark.parametrize("name", _HARMLESS)
def test_a_leftover_alone_is_no_bad_verdict(on_the_cpu: Run, name: str) -> None:
    assert on_the_cpu.kind(f":{name}") == "ok"


def test_a_leftover_that_breaks_the_next_training_step_still_does(on_the_cpu: Run) -> None:
    assert on_the_cpu.kind(":grad_mode") == "poisoned"


def test_a_scenario_that_no_fresh_worker_builds_is_skipped_after_its_first_case(tmp_path: pathlib.Path) -> None:
    paths = [word for name in ("looks", "looks_1", "looks_2") for word in ("--path", f"faults.leftovers:{name}")]
    run = probe(tmp_path, *_ONE_SCENARIO, *paths, "-k", "leftovers", env={"FSDP_DOCTOR_TEST_NOTHING_BUILDS": "1"})
    assert run.report is not None
    assert [result.verdict.kind for result in run.report.results] == ["crash", "skipped", "skipped"]
    assert "build: RuntimeError: left by another case" in run.report.results[0].verdict.reason
