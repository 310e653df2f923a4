"""Each entry of the catalogue says how its remedy was run: by a case, by a test, or not at all.

``test_cases_of_remedies.py`` runs the cases.
"""

from __future__ import annotations

import ast
import pathlib

from support.places import ROOT
from support.remedies import list_remedy_runs

from fsdp_doctor.known.catalogue import find_entry, read_catalogue
from fsdp_doctor.known.failures import NOT_RUN
from fsdp_doctor.matrix.selection import Selection, select


def test_a_remedy_is_run_by_a_case_or_test_that_there_is() -> None:
    for run in list_remedy_runs():
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
