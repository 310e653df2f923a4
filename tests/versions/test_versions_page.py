"""docs/versions.md: its table has the numbers of the committed merged report."""

from __future__ import annotations

from collections import Counter

from support.places import ROOT

from fsdp_doctor.versions.merged import MergedReport
from fsdp_doctor.versions.merged_file import read_merged

_MERGED = read_merged(ROOT / "docs" / "compat" / "merged.json.gz")
_PAGE = (ROOT / "docs" / "versions.md").read_text()


def _table(merged: MergedReport) -> str:
    rows = ["| torch | device | ranks | transformers | ok | bad | not run |", "|---|---|---|---|---|---|---|"]
    for number, one in enumerate(merged.environments):
        kinds = Counter(merged.shown(case, number) for case in merged.cases)
        not_run = kinds["unsupported"] + kinds["skipped"] + kinds["not run"]
        bad = len(merged.cases) - kinds["ok"] - not_run
        device = one.accelerators[0] if one.accelerators else one.device
        cells = (one.torch, device, one.world_size, one.packages["transformers"], kinds["ok"], bad, not_run)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def test_the_table_is_that_of_the_committed_report() -> None:
    assert _table(_MERGED) in _PAGE


def test_every_run_is_whole_and_small_enough_to_be_committed() -> None:
    assert all(one.complete for one in _MERGED.environments)
    assert (ROOT / "docs" / "compat" / "merged.json.gz").stat().st_size < 1_500_000


def test_no_failure_of_it_is_unknown_to_the_catalogue() -> None:
    shown = {one for case in _MERGED.cases for one in case.outcomes if one is not None}
    unknown = [
        _MERGED.outcomes[one] for one in shown if _MERGED.outcomes[one].kind not in ("ok", "unsupported", "skipped")
    ]
    assert [one.reason for one in unknown if not one.known] == []


def test_a_case_that_changed_between_two_versions_is_explained() -> None:
    changed = [case.path for case in _MERGED.cases if any(statement.changes for statement in case.statements)]
    assert [path for path in changed if f"`{path}`" not in _PAGE] == []
