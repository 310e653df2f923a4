"""fsdp-doctor check --probe: what it starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdp_doctor.cli.check import check
from fsdp_doctor.machine import launch

_CONFIG = ["training.enable_cpu_offload=true", "parallelism.data_parallel_shard_degree=-1", "checkpoint.enable=true"]


@pytest.mark.parametrize(("world_size", "expected"), [(3, 3), (1, 1), (None, 2)])
def test_the_probe_runs_the_cases_on_the_given_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int | None, expected: int
) -> None:
    started: list[tuple[Sequence[str], int]] = []

    def start(arguments: Sequence[str], nproc: int, num_groups: int) -> int:
        assert num_groups == 1
        started.append((arguments, nproc))
        return 7

    monkeypatch.setattr(launch, "start_ranks", start)
    monkeypatch.setattr(launch, "choose_num_ranks", lambda device: 2)
    with pytest.raises(SystemExit) as end:
        check(config=_CONFIG, world_size=world_size, probe=True)
    assert end.value.code == 7
    [(arguments, nproc)] = started
    assert nproc == expected
    assert arguments[0] == "probe"
    assert "fsdp2/policy/unstaged/dcp" in arguments
    assert set(arguments[1::2]) == {"--case"}
