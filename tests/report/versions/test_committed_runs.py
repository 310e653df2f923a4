"""The committed merged report, and what is made from it: tables of docs/versions.md, versions in the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from support.places import ROOT
from support.reports import report, result

from fsdp_doctor.known.catalogue import DIRECTORY
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.frameworks.framework_scenarios import is_framework_id
from fsdp_doctor.matrix.methods import METHOD_NAMES
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.versions.measured import insert_measured, list_measured
from fsdp_doctor.report.versions.merged import NO_ANSWER, MergedCase, read_merged
from fsdp_doctor.report.versions.merging import merge
from fsdp_doctor.verdict.classification import GOOD

_MERGED = read_merged(ROOT / "docs" / "compat" / "merged.json.gz")
_PAGE = (ROOT / "docs" / "versions.md").read_text()


def _counts(number: int, cases: list[MergedCase]) -> tuple[int, int, int, int]:
    """Counts in the environment of that number: ok, bad, not measurable, and without a verdict."""
    kinds = Counter(_MERGED.show(case, number) for case in cases)
    not_run = kinds["unsupported"] + kinds["skipped"] + kinds["not run"]
    good, unmeasurable = kinds["ok"] + kinds["refused"], kinds["unmeasurable"]
    return good, len(cases) - good - not_run - unmeasurable, unmeasurable, not_run


def _matrix_table() -> str:
    rows = ["| torch | device | ranks | transformers | ok | bad | not measurable | not run |", "|---" * 8 + "|"]
    cases = [case for case in _MERGED.cases if not is_framework_id(case.id)]
    for number, environment in enumerate(_MERGED.environments):
        if all(case.outcomes[number] is None for case in cases):
            continue
        device = environment.accelerators[0] if environment.accelerators else environment.device
        cells = (
            environment.torch,
            device,
            environment.world_size,
            environment.packages["transformers"],
            *_counts(number, cases),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _frameworks_table() -> str:
    packages = ("accelerate", "transformers", "peft")
    rows = [f"| framework | torch | {' | '.join(packages)} | ok | bad | not run |", "|---" * 8 + "|"]
    for framework in BUILT_IN:
        cases = [case for case in _MERGED.cases if case.id.startswith(f"{framework}:")]
        for number, environment in enumerate(_MERGED.environments):
            if any(case.outcomes[number] is not None for case in cases):
                own = "" if framework in packages else environment.packages.get(framework, "")
                name = f"{framework} {own}".strip()
                versions = (environment.torch, *(environment.packages[package] for package in packages))
                good, bad, _, not_run = _counts(number, cases)
                rows.append(f"| {' | '.join(map(str, (name, *versions, good, bad, not_run)))} |")
    return "\n".join(rows)


@pytest.mark.parametrize("table", [_matrix_table, _frameworks_table])
def test_the_tables_are_those_of_the_committed_report(table: Callable[[], str]) -> None:
    assert table() in _PAGE


def test_every_run_is_whole_and_small_enough_to_be_committed() -> None:
    assert all(environment.complete for environment in _MERGED.environments)
    assert (ROOT / "docs" / "compat" / "merged.json.gz").stat().st_size < 1_500_000


def test_no_failure_of_it_is_unknown_to_the_catalogue() -> None:
    shown = {one for case in _MERGED.cases for one in case.outcomes if one is not None}
    unknown = [_MERGED.outcomes[one] for one in shown if _MERGED.outcomes[one].kind not in GOOD | NO_ANSWER]
    assert [one.reason for one in unknown if not one.known] == []


def test_a_case_that_changed_between_two_versions_is_explained() -> None:
    changed = [case.method for case in _MERGED.cases if any(statement.changes for statement in case.statements)]
    assert [method for method in changed if f"`{method}`" not in _PAGE] == []


_ENTRY = "summon-full-params-noop-on-fsdp2"
_CASE = parse_case_id("fsdp2/none/unstaged/summon_full_params", METHOD_NAMES)
_REASON = "dtensor where a full tensor was promised: model.embed_tokens.weight"


def _report(torch: str, device: str, known: bool = True) -> Report:
    shown = result(_CASE, "wrong" if known else "ok", _REASON)
    environment = {"torch": torch, "packages": {"torch": torch}}
    return report(shown, environment=environment, device=device, created=torch)


def test_the_catalogue_says_what_the_committed_runs_showed() -> None:
    versions = list_measured(_MERGED)
    assert versions
    for file in DIRECTORY.glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        assert insert_measured(text, versions) == text, (
            "run: python -m fsdp_doctor.report.versions.measured docs/compat/merged.json.gz"
        )


def test_consecutive_releases_are_a_range_without_those_that_did_not_run() -> None:
    shown = [_report(torch, "emulated") for torch in ("2.10.0", "2.11.0", "2.13.0", "2.15.0", "2.15.1")]
    fine = [_report("2.12.0", "emulated", known=False), _report("2.6.0", "cpu")]
    found = list_measured(merge({str(number): one for number, one in enumerate([*shown, *fine])}))
    assert found == {_ENTRY: ("cpu: 2.6", "emulated: 2.10 to 2.11, 2.13, 2.15.0 to 2.15.1")}


def test_an_entry_without_a_measurement_loses_the_line_and_others_get_theirs() -> None:
    text = 'id = "a"\nevidence = "x"\nmeasured = ["cpu: 2.6"]\n\nid = "b"\nevidence = "y"\n'
    assert insert_measured(text, {"b": ("cpu: 2.7",)}) == (
        'id = "a"\nevidence = "x"\n\nid = "b"\nevidence = "y"\nmeasured = ["cpu: 2.7"]\n'
    )
