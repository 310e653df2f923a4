"""Which cases are run again when a framework's session cannot be built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.rank_reports import fine, record

from fsdp_doctor.matrix.frameworks.framework_scenarios import parse_framework_id
from fsdp_doctor.probe.conductor import run_cases
from fsdp_doctor.verdict.records import RankReport

_SCENARIO = "verl:fsdp2/policy"
_METHODS = ("initialize", "initialize+fix", "load_checkpoint", "load_checkpoint+fix", "load_checkpoint.fresh")
_IDS = [f"{_SCENARIO}/{method}" for method in _METHODS]


class _Conductor:
    """Runs every case well, except one that cannot be built."""

    def __init__(self, cases: list[Any], unbuildable: str) -> None:
        self._cases, self._unbuildable = cases, unbuildable
        self.unavailable: dict[str, str] = {}
        self.generation: str | None = None
        self.has_run_a_case = False

    def start(self, case: Any, task: str = "run") -> None:
        self.generation = case.scenario.generation

    def retire(self) -> None:
        self.generation = None

    def run(self, number: int) -> list[RankReport]:
        if self._cases[number].id != self._unbuildable:
            return [fine(rank) for rank in range(2)]
        return [RankReport(rank=rank, record=record("build", unsupported="no build")) for rank in range(2)]


def _run(unbuildable: str) -> dict[str, str]:
    cases = [parse_framework_id(id) for id in _IDS]
    conductor: Any = _Conductor(cases, unbuildable)
    writers: Any = SimpleNamespace(write_for=lambda number: None)
    results = run_cases(conductor, cases, range(len(cases)), writers=writers, world_size=2, confirm=False)
    return {case.id: result.verdict.kind for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("method", ["initialize+fix", "load_checkpoint+fix"])
def test_a_refused_fix_leaves_the_other_cases_to_run(method: str) -> None:
    refused = f"{_SCENARIO}/{method}"
    assert _run(refused) == dict.fromkeys(_IDS, "ok") | {refused: "unsupported"}


def test_a_configuration_that_cannot_be_built_is_tried_once() -> None:
    assert _run(f"{_SCENARIO}/initialize") == dict.fromkeys(_IDS, "unsupported")
