"""Extractions whose entries are not ready, or not the receiver's to keep, are found where each entry is read alone."""

from __future__ import annotations

import pytest
from program import Run, probe, user_methods

_KEPT = "the second call: kept to the end, and {} since it was yielded, where the method promises keeps=True"
_OVERWRITTEN, _FREED = _KEPT.format("overwritten"), _KEPT.format("freed")
_UNORDERED = "neither waits for the other"
_FAULTS: dict[str, tuple[str, str]] = {
    "copies_on_a_side_stream": ("race", _UNORDERED),
    "returns_copies_of_a_side_stream": ("race", _UNORDERED),
    "waits_after_the_entry_was_read": ("race", _UNORDERED),
    "gathers_on_a_side_stream": ("race", _UNORDERED),
    "copies_before_the_gather_ends": ("race", _UNORDERED),
    "records_the_event_too_early": ("race", _UNORDERED),
    "waits_for_another_stream": ("race", _UNORDERED),
    "prefetches_and_waits_for_the_entry_before": ("race", _UNORDERED),
    "yields_views_of_a_bucket_that_fills": ("race", _UNORDERED),
    "does_not_wait_for_a_collective": ("race", _UNORDERED),
    "waits_for_the_wrong_stream_of_two": ("race", _UNORDERED),
    "casts_on_a_side_stream": ("race", _UNORDERED),
    "frees_what_the_side_stream_reads": ("race", "without record_stream"),
    "refills_a_pinned_buffer_under_way": ("race", "the host does not wait for it"),
    "reads_pinned_memory_too_early": ("wrong", "elements differ"),
    "yields_pinned_memory_too_early": ("wrong", "elements differ"),
    "waits_for_the_stream_that_copies_nothing": ("wrong", "elements differ"),
    "reuses_one_buffer": ("wrong", _OVERWRITTEN),
    "reuses_two_buffers_in_turn": ("wrong", _OVERWRITTEN),
    "zeroes_its_buffer_at_the_end": ("wrong", _OVERWRITTEN),
    "scales_what_it_has_yielded": ("wrong", _OVERWRITTEN),
    "reuses_one_buffer_of_the_host": ("wrong", _OVERWRITTEN),
    "frees_what_it_has_yielded": ("wrong", _FREED),
    "yields_fsdps_unsharded_memory": ("wrong", _FREED),
    "returns_fsdps_unsharded_memory": ("wrong", "its memory was freed before it was read"),
}
_RIGHT = (
    "waits_for_the_side_stream",
    "waits_for_an_event",
    "waits_on_the_host_for_the_side_stream",
    "waits_for_the_whole_device",
    "gathers_on_a_side_stream_and_waits",
    "prefetches_and_waits_for_its_own_entry",
    "waits_for_a_collective",
    "yields_what_waits_by_itself",
    "waits_for_pinned_memory",
    "refills_a_pinned_buffer_that_was_read",
    "reuses_one_buffer_and_says_so",
    "scales_what_it_has_yielded_and_says_so",
    "yields_fsdps_unsharded_memory_and_says_so",
    "copies_fsdps_unsharded_memory",
    "yields_views_of_a_full_bucket",
)


def _probe(directory_factory: pytest.TempPathFactory, strategy: str, *names: str) -> Run:
    scenario = ("--strategy", strategy, "--offload", "none", "--staging", "unstaged")
    methods = user_methods(*(f"unordered:{name}" for name in names))
    return probe(directory_factory.mktemp("planted"), *scenario, *methods, "-k", "unordered", device="emulated")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _probe(tmp_path_factory, "fsdp2", *_FAULTS, *_RIGHT)


@pytest.fixture(scope="module")
def of_fsdp1(tmp_path_factory: pytest.TempPathFactory) -> Run:
    names = ("yields_the_unsharded_flat_parameter", "copies_the_unsharded_flat_parameter")
    return _probe(tmp_path_factory, "fsdp1-orig", *names)


@pytest.mark.parametrize("name", _FAULTS)
def test_an_entry_that_cannot_be_used_is_found(planted: Run, name: str) -> None:
    kind, reason = _FAULTS[name]
    verdict = planted.result(f":{name}").verdict
    assert (verdict.kind, reason in verdict.reason) == (kind, True), verdict


@pytest.mark.parametrize("name", _RIGHT)
def test_an_entry_that_is_ready_and_stays_is_ok(planted: Run, name: str) -> None:
    verdict = planted.result(f":{name}").verdict
    assert verdict.kind == "ok", verdict


def test_views_of_a_summoned_flat_parameter_may_not_be_kept(of_fsdp1: Run) -> None:
    verdict = of_fsdp1.result(":yields_the_unsharded_flat_parameter").verdict
    assert (verdict.kind, _FREED in verdict.reason) == ("wrong", True), verdict
    assert of_fsdp1.kind(":copies_the_unsharded_flat_parameter") == "ok"
