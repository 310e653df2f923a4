"""The default matrix on the emulated device: run once, and held against GPUs, the catalogue and every format."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import torch
from program import default_matrix, default_matrix_file
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.known.catalogue import list_expected_failures
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.methods import FIXES
from fsdp_doctor.report.comparison import list_differences, select_common_cases
from fsdp_doctor.report.failure_groups import group_failures
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.verdict.classification import GOOD

_TWO_H200S = ROOT / "examples" / "reports" / "2xh200.json.gz"


# One rank is alone in a collective, or two are in it with different sizes. gloo holds the host in the call; NCCL's host
# runs on to the next synchronization: there the stacks are taken.
_NCCL_RUNS_ON = {
    f"fsdp2/none/unstaged/{case}"
    for case in (
        "fresh/set_model_state_dict.broadcast.again",
        "fresh/bf16/distribute_tensor.assign",
        "fresh/fp32/distribute_tensor.assign",
        "fresh/extra-key/to_empty.broadcast",
        "fresh/missing-key/distribute_tensor.assign",
        "qwen3-tied/fresh/tied-once/distribute_tensor.assign",
    )
}


def test_it_agrees_with_two_h200s() -> None:
    """Compares verdict, exception, message, what was yielded, and what training did next, over the cases of both.

    A method or an axis value that is newer than the committed report is listed and not compared, so adding one
    needs no GPU.
    """
    committed = read_report(_TWO_H200S)
    found = list_differences(default_matrix(), committed, frozenset({"device"}))
    # When the committed report was made, no refusal was judged.
    not_judged = [d for d in found if (d.what, d.left, d.right) == ("verdict", "crash", "refused")]
    elsewhere = [d for d in found if d.case_id in _NCCL_RUNS_ON and d.what in ("reason", "ranks")]
    # What our own methods say is ours to change.
    elsewhere += [d for d in found if d.what == "reason" and d.case_id.rpartition("/")[2] in FIXES]
    compared = [difference for difference in select_common_cases(found) if difference not in [*elsewhere, *not_judged]]
    for difference in found:
        if difference not in [*compared, *elsewhere, *not_judged]:
            print("only in one report:", difference.case_id)
    assert {result.id for result in committed.results} & {result.id for result in default_matrix().results}
    assert compared == []


def test_every_finding_is_known() -> None:
    report = default_matrix()
    assert len(report.bad) > 90
    assert [result.id for result in report.bad if not result.known] == []
    assert all(failure.known is not None for failure in group_failures(report))


def test_the_catalogue_foretells_every_verdict() -> None:
    for result in default_matrix().results:
        known = list_expected_failures(result.case, RunContext(torch=torch.__version__, device="emulated"))
        assert result.verdict.kind in {"unsupported", *([known[0].verdict] if known else GOOD)}, result.id


@pytest.mark.parametrize("form", ["lines", "markdown", "junit", "json"])
def test_every_format_names_the_entry(form: str) -> None:
    shown = doctor("report", "show", str(default_matrix_file()), "--format", form).stdout
    assert "fsdp2-pinned-policy-half-moved" in shown


def test_the_table_has_a_line_for_each_known_entry() -> None:
    shown = doctor("report", "show", str(default_matrix_file()), "--expect", "known").stdout
    codes = re.findall(r"^ *\d+  (FD\d{3}) \w", shown, re.MULTILINE)
    known = {failure.known.short_code for failure in group_failures(default_matrix()) if failure.known is not None}
    assert (len(codes), set(codes)) == (len(known), known)
    assert "remedy:" not in shown


def test_the_verbose_table_has_remedies_and_commands() -> None:
    shown = doctor("report", "show", str(default_matrix_file()), "--verbose").stdout
    assert "remedy: " in shown
    assert "--case 'fsdp2/policy/staged/state_dict'" in shown


def test_an_unexpected_failure_is_whole_in_the_table(tmp_path: pathlib.Path) -> None:
    """Every failure is unexpected against a report in which all was well."""
    document = json.loads(default_matrix_file().read_text())
    for case in document["results"]:
        case["verdict"] = {"kind": "ok", "reason": "", "ranks": [], "also": []}
        case["known"] = ""
    (tmp_path / "well.json").write_text(json.dumps(document))
    shown = doctor("report", "show", str(default_matrix_file()), "--expect", str(tmp_path / "well.json")).stdout
    assert "remedy: " in shown
