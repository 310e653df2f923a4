"""Tests that what a method leaves behind in the process decides no later case."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_methods

# Every case of a scenario before its first training step builds it again, and then trains.
_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--phase", "fresh")
_LEFT = (
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
    # What cannot be undone: no other case runs in the process.
    "inference_mode",
    "signal_that_asks_for_the_stack",
    "descriptors",
    "closed_stdout",
    "thread",
    "thread_on_rank_1",
    "process_group",
    "next_build",
)
_HARMLESS = (
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
# What a training step of some model depends on, whether that of the small one here does or not.
_OF_TRAINING = ("grad_mode", "grad_mode_on_rank_1", "default_dtype", "deterministic_mode", "autocast", "random_numbers")


def _probe(directory: pathlib.Path, names: tuple[str, ...], device: str) -> Run:
    """Each of them looks for what the one before it has left, and ``looks`` for what the last one has."""
    methods = user_methods(*(f"side_effects:{name}" for name in (*names, "looks")))
    return probe(directory, *_ONE_SCENARIO, *methods, "-k", "side_effects", device=device)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _probe(tmp_path_factory.mktemp("cpu"), _LEFT, device="cpu")


@pytest.fixture(scope="module")
def on_a_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _probe(tmp_path_factory.mktemp("emulated"), ("stream", "device", "random_numbers"), device="emulated")


def test_no_side_effect_reaches_the_next_case(on_the_cpu: Run, on_a_device: Run) -> None:
    for run, num_cases in ((on_the_cpu, len(_LEFT) + 1), (on_a_device, 4)):
        assert run.report is not None, run.stderr
        assert run.report.complete
        assert len(run.report.results) == num_cases
        assert run.report.count_kind("skipped") == 0
        found = {result.id: result.verdict.reason for result in run.report.results}
        assert {case: reason for case, reason in found.items() if "AssertionError" in reason} == {}
        assert run.kind(":looks") == "ok"


@pytest.mark.parametrize("name", _HARMLESS)
def test_a_side_effect_alone_is_no_bad_verdict(on_the_cpu: Run, name: str) -> None:
    assert on_the_cpu.kind(f":{name}") == "ok"


@pytest.mark.parametrize("name", _OF_TRAINING)
def test_a_setting_that_training_depends_on_is_poisoned(on_the_cpu: Run, name: str) -> None:
    assert on_the_cpu.kind(f":{name}") == "poisoned"


def test_a_scenario_that_no_fresh_worker_builds_is_skipped_after_one_case(tmp_path: pathlib.Path) -> None:
    methods = user_methods(*(f"side_effects:{name}" for name in ("looks", "stream", "device")))
    run = probe(tmp_path, *_ONE_SCENARIO, *methods, "-k", "side_effects", env={"FSDP_DOCTOR_TEST_NOTHING_BUILDS": "1"})
    assert run.report is not None
    assert [result.verdict.kind for result in run.report.results] == ["crash", "skipped", "skipped"]
    assert "build: RuntimeError: left by another case" in run.report.results[0].verdict.reason


def test_a_load_begun_by_one_rank_does_not_reach_the_next_method(tmp_path: pathlib.Path) -> None:
    methods = user_methods("loaders:loads_on_one_rank", "loaders:loads_with_the_others")
    scenario = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--checkpoint", "exact")
    run = probe(tmp_path, "--direction", "in", "--init", "meta", *scenario, *methods, "-k", "faults")
    assert run.kind("faults.loaders:loads_on_one_rank") == "crash"
    assert run.kind("faults.loaders:loads_with_the_others") == "ok", run.stderr
