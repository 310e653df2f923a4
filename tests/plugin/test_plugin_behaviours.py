"""Tests marked ranks: how each may end, and that what one does is not another's."""

from __future__ import annotations

import os
import pathlib

import pytest
from support.emulation import needs_emulation
from support.plugin_runs import PytestRun, run_pytest, start_pytest

_WAITS = """
import threading

import pytest
import torch.distributed as dist


def _waits_alone():
    threading.Event().wait()


@pytest.mark.ranks(2, device="cpu")
def test_waits():
    if dist.get_rank() == 0:
        _waits_alone()
    dist.barrier()
"""


@pytest.fixture(scope="module")
def behaviours(tmp_path_factory: pytest.TempPathFactory) -> PytestRun:
    needs_emulation()
    arguments = ("-p", "no:cacheprovider", "--durations=3", "-rA")
    return run_pytest(tmp_path_factory.mktemp("behaviours"), *arguments, suites=["behaviours", "raises_on_rank_1"])


@pytest.mark.parametrize(
    "name",
    [
        "test_passes",
        "test_is_run_by_the_same_process",
        "test_has_directories",
        "test_leaves_a_thread_on_rank_1",
        "test_captures",
        "test_has_three_ranks_on_the_cpu",
        "test_is_a_method",
        "test_passes_after_all_that",
    ],
)
def test_fixtures_and_bodies_run_on_every_rank(behaviours: PytestRun, name: str) -> None:
    assert behaviours[name].outcome == "passed", behaviours[name].text


def test_a_module_fixture_is_set_up_once_on_each_rank(behaviours: PytestRun) -> None:
    assert behaviours["test_passes"].text.count("of_module is set up") == 2
    assert "of_module" not in behaviours["test_is_run_by_the_same_process"].text
    assert behaviours["test_passes_after_all_that"].text.count("of_module is torn down") == 2


def test_an_assert_on_one_rank_is_shown_with_its_rank_and_values(behaviours: PytestRun) -> None:
    result = behaviours["test_asserts_on_rank_1"]
    assert result.outcome == "failed"
    assert result.message.startswith("Failed: rank 1: AssertionError: assert [1, 2, 4] == [1, 2, 3]")
    assert "At index 2 diff: 4 != 3" in result.text
    assert "-- rank 1 --" in result.text
    assert "-- rank 0 --" not in result.text
    for rank in (0, 1):
        assert f"said by rank {rank}" in result.text


@pytest.mark.parametrize(
    ("name", "once"),
    [
        ("test_asserts_on_all", "Differing items:"),
        ("test_raises_in_torch_with_other_values_on_each_rank", "E   RuntimeError"),
        ("test_raises_with_its_device", "E   RuntimeError"),
        ("test_stops_in_a_debugger", "    breakpoint()"),
    ],
)
def test_a_failure_that_is_alike_on_all_ranks_is_shown_once(behaviours: PytestRun, name: str, once: str) -> None:
    result = behaviours[name]
    assert result.outcome == "failed"
    assert result.text.count(once) == 1
    assert "-- ranks 0, 1 --" in result.text


def test_a_failure_in_a_library_shows_the_frames_of_the_tested_code(behaviours: PytestRun) -> None:
    result = behaviours["test_raises_in_torch_with_other_values_on_each_rank"]
    assert result.message.startswith("Failed: every rank: RuntimeError")
    assert "in _calls_torch" in result.text
    assert "in wrapper" not in result.text, "a frame of torch that did not raise"


def test_the_ranks_of_a_failure_are_shown_in_30_lines(behaviours: PytestRun) -> None:
    for name, own_frame in (
        ("test_raises_deep_down_otherwise_on_each_rank", "in _goes_down"),
        ("test_hangs", "in _waits_elsewhere"),
    ):
        shown = behaviours[name].text.split("- Captured ")[0].splitlines()
        assert len(shown) <= 30, shown
        assert any(own_frame in line for line in shown)
    message = behaviours["test_raises_deep_down_otherwise_on_each_rank"].message
    assert message.startswith(("Failed: rank 0: ValueError: first", "Failed: rank 1: ValueError: second"))


def test_a_breakpoint_names_what_can_be_done_instead(behaviours: PytestRun) -> None:
    assert "PYTHONBREAKPOINT" in behaviours["test_stops_in_a_debugger"].text


def test_a_fixture_that_raises_on_one_rank_is_a_setup_error(behaviours: PytestRun) -> None:
    result = behaviours["test_has_a_failing_fixture"]
    assert result.outcome == "error"
    assert "rank 1: ValueError: planted in a fixture" in result.message


def test_an_exit_of_one_rank_fails_its_test_with_every_ranks_output(behaviours: PytestRun) -> None:
    result = behaviours["test_exits"]
    assert result.outcome == "failed"
    assert "died: rank 1: ended with exit code 3" in result.message
    for rank in (0, 1):
        assert f"last words of rank {rank}" in result.text
    assert "dist.barrier()" in result.text, "where the other rank was"


def test_the_time_limit_of_pytest_timeout_shows_every_ranks_stack(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pytest_timeout", reason="pytest-timeout is not installed")
    (tmp_path / "test_limited.py").write_text(_WAITS)
    result = run_pytest(tmp_path, "-p", "pytest_timeout", "--timeout", "20")["test_waits"]
    assert (result.outcome, "no progress in stage test for 20 s" in result.message) == ("failed", True)
    assert "-- rank 0, stopped: " in result.text
    assert "in _waits_alone" in result.text
    assert "rank_host.py" not in result.text


def test_a_killed_rank_is_never_a_pass(behaviours: PytestRun) -> None:
    result = behaviours["test_is_killed"]
    assert result.outcome == "failed"
    assert "died: rank 1: ended with SIGKILL" in result.message


def test_sys_exit_with_0_is_no_pass(behaviours: PytestRun) -> None:
    assert behaviours["test_calls_sys_exit"].outcome == "failed"
    assert "SystemExit" in behaviours["test_calls_sys_exit"].message


def test_a_hang_fails_its_test_with_every_ranks_stack_and_output(behaviours: PytestRun) -> None:
    result = behaviours["test_hangs"]
    assert result.outcome == "failed"
    assert result.message.startswith("Failed: hang: no progress in stage test for 3 s: ")
    assert "in barrier" in result.text
    assert "in _waits_elsewhere" in result.text
    for rank in (0, 1):
        assert f"-- rank {rank}, stopped: " in result.text
        assert f"rank {rank} before the barrier" in result.text
    assert "_pytest/" not in result.text, "the frames of pytest itself are left out"


def test_a_collective_that_one_rank_alone_began_is_found_after_the_test(behaviours: PytestRun) -> None:
    assert behaviours["test_leaves_a_collective_unmatched"].outcome == "error"


def test_a_skip_counts_where_every_rank_skips(behaviours: PytestRun) -> None:
    assert behaviours["test_skips"].outcome == "skipped"
    assert "for a reason" in behaviours["test_skips"].message
    assert behaviours["test_skips_on_rank_1"].outcome == "failed"
    assert "skipped on rank 1, but not on the other ranks" in behaviours["test_skips_on_rank_1"].message


def test_a_test_expected_to_fail_may_fail_on_any_rank(behaviours: PytestRun) -> None:
    assert behaviours["test_is_expected_to_fail"].outcome == "skipped"
    assert behaviours["test_is_expected_to_fail_and_passes"].outcome == "failed"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("test_has_no_number_of_ranks", "the number of ranks must be a positive whole number, not 'two'"),
        ("test_has_an_unknown_device", "unknown device 'tpu'; use one of auto, cuda, xpu, cpu, emulated"),
        ("test_is_of_unittest", "test_is_of_unittest is not a test function"),
        ("test_has_no_scenario", "fsdp_case is for tests marked fsdp, but this test is marked ranks"),
    ],
)
def test_a_mark_that_means_nothing_is_one_sentence(behaviours: PytestRun, name: str, sentence: str) -> None:
    assert behaviours[name].outcome == "error"
    assert sentence in behaviours[name].message
    assert "Traceback" not in behaviours[name].text


def test_a_file_that_one_rank_cannot_import_fails_its_tests_alone(behaviours: PytestRun) -> None:
    result = behaviours["test_is_in_a_file_that_raises"]
    assert result.outcome == "error"
    assert "rank 1: CollectError: this rank does not collect the test" in result.message
    assert "ValueError: planted at the import" in result.text


def test_a_supervisor_that_is_killed_fails_one_test(behaviours: PytestRun) -> None:
    result = behaviours["test_kills_its_supervisor"]
    assert result.outcome == "failed"
    assert "the process that supervises the ranks ended with exit code -9" in result.message


def test_ctrl_c_ends_the_ranks_with_the_run(tmp_path: pathlib.Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    started = start_pytest(
        tmp_path, "-p", "no:cacheprovider", suites=["endless"], env={"FSDP_DOCTOR_TEST_FIFO": str(fifo)}
    )
    assert started.told(fifo) == "begun"
    started.interrupt()
    done = started.wait()
    assert done.code == pytest.ExitCode.INTERRUPTED
    assert done.left == []


def test_durations_are_those_of_the_phases_on_the_ranks(behaviours: PytestRun) -> None:
    assert "slowest 3 durations" in behaviours.run.stdout
    assert behaviours["test_hangs"].seconds > 3
