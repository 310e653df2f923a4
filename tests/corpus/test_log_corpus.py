"""Logs from public threads are explained no worse than before, and none wrongly."""

from __future__ import annotations

import pathlib
import sys
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from score_logs import HERE, logs, scored, set_of

from fsdp_doctor.known.catalogue import read_catalogue


def test_no_log_is_explained_wrongly_and_nearly_all_rightly() -> None:
    scores = {row["file"]: scored(row)[0] for row in logs()}
    assert [file for file, score in scores.items() if score == "wrong"] == []
    assert Counter(scores.values())["right"] >= 0.95 * len(scores)


def test_the_corpus_is_large_with_a_third_of_others_and_two_halves() -> None:
    rows = logs()
    assert len(rows) >= 80
    assert sum(not row["scope"] for row in rows) >= len(rows) / 3
    halves = Counter(map(set_of, rows))
    assert min(halves["seen"], halves["unseen"]) > 40


def test_every_log_has_its_row_and_every_entry_that_is_wanted_exists() -> None:
    rows = logs()
    assert {row["file"] for row in rows} == {path.name for path in (HERE / "logs").iterdir()}
    assert {name for row in rows for name in row.get("entries", [])} <= {entry.id for entry in read_catalogue()}
