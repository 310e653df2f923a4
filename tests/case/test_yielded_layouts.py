"""A path may yield a DTensor of any layout: it is judged by its promise, and never told as an exception of the path."""

from __future__ import annotations

import pytest
from program import Run, probe, user_paths

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--path", "state_dict")
_NOT_FULL = "dtensor where a full tensor was promised"
_EXPECTED: dict[str, tuple[str, str]] = {
    "partial_as_full": ("wrong", _NOT_FULL),
    "strided_as_full": ("wrong", _NOT_FULL),
    "on_two_dims_as_full": ("wrong", _NOT_FULL),
    "partial_as_shard": ("wrong", "so what a rank holds is a summand and not a shard"),
    "strided_as_shard": ("ok", ""),
    "strided_with_the_rows_of_the_other_rank": ("wrong", "elements differ"),
    "on_two_dims_as_shard": ("ok", ""),
    "sharded_by_the_last_dim": ("ok", ""),
    "replicated_as_shard": ("wrong", "its shards do not make up the whole tensor once"),
}


@pytest.fixture(scope="module")
def yielded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*(f"layouts:{name}" for name in _EXPECTED))
    return probe(tmp_path_factory.mktemp("layouts"), *_ONE_SCENARIO, *paths)


@pytest.mark.parametrize("path", list(_EXPECTED))
def test_a_layout_is_judged_by_what_was_promised(yielded: Run, path: str) -> None:
    kind, reason = _EXPECTED[path]
    verdict = yielded.result(f":{path}").verdict
    assert verdict.kind == kind, verdict
    assert reason in verdict.reason
