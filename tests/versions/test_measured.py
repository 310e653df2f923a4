"""The versions that the entries of the catalogue name as measured are those of the committed merged report."""

from __future__ import annotations

from support.places import ROOT
from support.reports import report, result

from fsdp_doctor.known.catalogue import DIRECTORY
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.paths import PATH_NAMES
from fsdp_doctor.report.document import Report
from fsdp_doctor.versions.measured import measured, with_measured
from fsdp_doctor.versions.merged import read_merged
from fsdp_doctor.versions.merging import merge

_ENTRY = "summon-full-params-noop-on-fsdp2"
_CASE = parse_case_id("fsdp2/none/unstaged/summon_full_params", PATH_NAMES)
_REASON = "dtensor where a full tensor was promised: model.embed_tokens.weight"


def _report(torch: str, device: str, known: bool = True) -> Report:
    shown = result(_CASE, "wrong" if known else "ok", _REASON)
    environment = {"torch": torch, "packages": {"torch": torch}}
    return report(shown, environment=environment, device=device, created=torch)


def test_the_catalogue_says_what_the_committed_runs_showed() -> None:
    found = measured(read_merged(ROOT / "docs" / "compat" / "merged.json.gz"))
    assert found
    for file in DIRECTORY.glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        assert with_measured(text, found) == text, (
            "run: python -m fsdp_doctor.versions.measured docs/compat/merged.json.gz"
        )


def test_releases_that_follow_one_another_are_a_range_and_what_did_not_run_is_in_none() -> None:
    shown = [_report(torch, "emulated") for torch in ("2.10.0", "2.11.0", "2.13.0", "2.15.0", "2.15.1")]
    fine = [_report("2.12.0", "emulated", known=False), _report("2.6.0", "cpu")]
    found = measured(merge({str(number): one for number, one in enumerate([*shown, *fine])}))
    assert found == {_ENTRY: ("cpu: 2.6", "emulated: 2.10 to 2.11, 2.13, 2.15.0 to 2.15.1")}


def test_an_entry_without_a_measurement_loses_the_line_and_others_get_theirs() -> None:
    text = 'id = "a"\nevidence = "x"\nmeasured = ["cpu: 2.6"]\n\nid = "b"\nevidence = "y"\n'
    assert with_measured(text, {"b": ("cpu: 2.7",)}) == (
        'id = "a"\nevidence = "x"\n\nid = "b"\nevidence = "y"\nmeasured = ["cpu: 2.7"]\n'
    )
