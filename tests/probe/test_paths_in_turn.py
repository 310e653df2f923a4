"""What one path has done to the ranks' agreements is no other path's affair."""

from __future__ import annotations

import pathlib

from program import probe, user_paths


def test_a_load_that_one_rank_alone_began_is_not_answered_to_the_next_path(tmp_path: pathlib.Path) -> None:
    paths = user_paths("loaders:loads_on_one_rank", "loaders:loads_with_the_others")
    scenario = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--checkpoint", "exact")
    run = probe(tmp_path, "--direction", "in", "--init", "meta", *scenario, *paths, "-k", "faults")
    assert run.kind("faults.loaders:loads_on_one_rank") == "crash"
    assert run.kind("faults.loaders:loads_with_the_others") == "ok", run.stderr
