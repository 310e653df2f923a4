"""Runs every case by which the catalogue says that a remedy was run: it is ok."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
from program import default_matrix, probe
from support.remedies import list_remedy_runs

# Shardings that need more ranks than two.
_OF_FOUR_RANKS = ("/tp/", "/hidden-experts/")
_CASES = [run for run in list_remedy_runs() if "::" not in run]
_FRAMEWORKS = sorted({case.partition(":")[0] for case in _CASES if ":" in case})


def _probe_kinds(directory: pathlib.Path, cases: list[str], *options: str) -> dict[str, str]:
    """Runs the cases on the emulated device, and returns the verdict of each."""
    words = [word for case in cases for word in ("--case", case)]
    done = probe(directory, *words, *options, device="emulated")
    assert done.report is not None, done.stdout
    kinds = {result.id: result.verdict.kind for result in done.report.results}
    assert kinds.keys() == set(cases)
    return kinds


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_case_that_follows_a_remedy_is_ok(ranks: int, tmp_path: pathlib.Path) -> None:
    of_four = [case for case in _CASES if any(name in f"{case}/" for name in _OF_FOUR_RANKS)]
    if ranks == 4:
        kinds = _probe_kinds(tmp_path, of_four, "--nproc", "4")
    else:
        chosen = [case for case in _CASES if case not in of_four and ":" not in case]
        # The default matrix, which other tests have run, has more than half of them on the same device and ranks.
        matrix = default_matrix()
        assert (matrix.device, matrix.world_size) == ("emulated", 2)
        kinds = {result.id: result.verdict.kind for result in matrix.results if result.id in chosen}
        kinds |= _probe_kinds(tmp_path, [case for case in chosen if case not in kinds], "--nproc", "2")
        assert kinds.keys() == set(chosen)
    # A refusal with the names of what does not fit is what some remedies promise.
    assert {case for case, kind in kinds.items() if kind not in ("ok", "refused")} == set()
    assert sum(kind == "refused" for kind in kinds.values()) <= 3


@pytest.mark.parametrize("framework", _FRAMEWORKS)
def test_a_case_of_a_framework_that_follows_a_remedy_is_ok(framework: str, tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec({"trainer": "transformers"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    kinds = _probe_kinds(tmp_path, [case for case in _CASES if case.startswith(f"{framework}:")])
    assert {case: kind for case, kind in kinds.items() if kind != "ok"} == {}
