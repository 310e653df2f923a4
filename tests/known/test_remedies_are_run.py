"""Each entry of the catalogue says how its remedy was run: by a case that is ok, by a test, or not at all."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest
from program import probe
from support.places import ROOT

from fsdp_doctor.known.catalogue import find_entry, read_catalogue
from fsdp_doctor.known.failures import NOT_RUN, KnownFailure
from fsdp_doctor.matrix.selection import Selection, select

# Shardings that need more ranks than two.
_OF_FOUR_RANKS = ("/tp/", "/hidden-experts/")


def _list_runs(entry: KnownFailure) -> Iterator[str]:
    """Returns how its remedies were run, those for users of frameworks among them."""
    yield from (run for run in (entry.remedy_run, *entry.remedies_run.values()) if run != NOT_RUN)


_RUNS = sorted({run for entry in read_catalogue() for run in _list_runs(entry)})
_CASES = [run for run in _RUNS if "::" not in run]
_FRAMEWORKS = sorted({case.partition(":")[0] for case in _CASES if ":" in case})


def test_a_remedy_is_run_by_a_case_or_test_that_there_is() -> None:
    for run in _RUNS:
        file, _, name = run.partition("::")
        if not name:
            assert select(Selection(case_ids=(run,)))[0].id == run
            continue
        tree = ast.parse(pathlib.Path(ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, run


def test_most_remedies_are_run() -> None:
    entries = read_catalogue()
    not_run = [entry.short_code for entry in entries if entry.remedy_run == NOT_RUN]
    assert len(not_run) * 3 < len(entries), not_run
    for entry in entries:
        assert entry.remedies_run.keys() <= entry.remedies.keys(), entry.id
        # The same case is ok with the versions of which the entry is not.
        assert entry.remedy_run != entry.evidence or entry.versions, entry.id


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_case_that_follows_a_remedy_is_ok(ranks: int, tmp_path: pathlib.Path) -> None:
    of_four = [case for case in _CASES if any(name in f"{case}/" for name in _OF_FOUR_RANKS)]
    chosen = of_four if ranks == 4 else [case for case in _CASES if case not in of_four and ":" not in case]
    options = [word for case in chosen for word in ("--case", case)]
    done = probe(tmp_path, *options, "--nproc", str(ranks), device="emulated")
    assert done.report is not None, done.stdout
    kinds = {result.id: result.verdict.kind for result in done.report.results}
    assert kinds.keys() == set(chosen)
    # A refusal with the names of what does not fit is what some remedies promise.
    assert {case for case, kind in kinds.items() if kind not in ("ok", "refused")} == set()
    assert sum(kind == "refused" for kind in kinds.values()) <= 3


@pytest.mark.parametrize("framework", _FRAMEWORKS)
def test_a_case_of_a_framework_that_follows_a_remedy_is_ok(framework: str, tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec({"trainer": "transformers"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    options = [word for case in _CASES if case.startswith(f"{framework}:") for word in ("--case", case)]
    done = probe(tmp_path, *options, device="emulated")
    assert done.report is not None, done.stdout
    assert {result.id: result.verdict.kind for result in done.report.results if result.verdict.kind != "ok"} == {}


def test_a_remedy_that_was_not_run_says_so_wherever_it_is_printed() -> None:
    entry = find_entry("FD001")
    assert entry.remedy_run != NOT_RUN
    assert entry.advice == entry.remedy
    assert entry.advise("verl") == entry.remedies["verl"]
    assert entry.advise("accelerate") == ""
    # Of a framework that nobody has run it with.
    of_framework = find_entry("FD005")
    assert of_framework.advise("nemo-rl") != of_framework.remedies["nemo-rl"]
    assert of_framework.advise("nemo-rl").startswith(of_framework.remedies["nemo-rl"])
    not_run = next(entry for entry in read_catalogue() if entry.remedy_run == NOT_RUN)
    assert not_run.advice.startswith(not_run.remedy)
    assert not_run.advice != not_run.remedy
