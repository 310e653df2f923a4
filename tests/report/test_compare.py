"""Comparison of two reports: each difference that counts shows, and no other."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import pytest
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.report.comparison import Difference, list_differences, select_common_cases
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import read_report, write_report
from fsdp_doctor.verdict.classification import Verdict

_FULL = ROOT / "examples" / "reports" / "full"
_FILE = _FULL / "2xh200-fsdp2.json.gz"
_CRASH, _OK, _HANG = "fsdp2/policy/staged/state_dict", "fsdp2/none/unstaged/state_dict", "uneven/from_local"
_DEVICE = frozenset({"device"})


@pytest.fixture(scope="module")
def report() -> Report:
    whole = read_report(_FILE)
    return dataclasses.replace(whole, results=tuple(r for r in whole.results if r.id.endswith((_CRASH, _OK, _HANG))))


def _changed(report: Report, ending: str, **changes: object) -> Report:
    """The report with other fields of one case, or of its verdict."""
    results = [_with(result, changes) if result.id.endswith(ending) else result for result in report.results]
    return dataclasses.replace(report, results=tuple(results))


def _with(result: CaseResult, changes: dict[str, object]) -> CaseResult:
    of_verdict = {field.name for field in dataclasses.fields(Verdict)}
    verdict = dataclasses.replace(result.verdict, **{k: v for k, v in changes.items() if k in of_verdict})
    others = {name: value for name, value in changes.items() if name not in of_verdict}
    return dataclasses.replace(result, verdict=verdict, **others)


@pytest.mark.parametrize(
    ("ending", "changes", "what"),
    [
        (_OK, {"kind": "wrong"}, "verdict"),
        (_CRASH, {"reason": "RuntimeError: something else"}, "reason"),
        (_CRASH, {"also": ("next training step: RuntimeError: something",)}, "reason"),
        (_CRASH, {"ranks": (1,)}, "ranks"),
        (_OK, {"yielded": ({"dtensor float32 cuda": 24}, {"dtensor float32 cuda": 25})}, "yielded"),
        (_OK, {"yielded": ({"dtensor float32 cpu": 25}, {"dtensor float32 cuda": 25})}, "yielded"),
        (_OK, {"yielded": ({"dtensor bfloat16 cuda": 25}, {"dtensor float32 cuda": 25})}, "yielded"),
    ],
    ids=["verdict", "message", "next step", "ranks", "count", "device", "dtype"],
)
def test_a_difference_shows(report: Report, ending: str, changes: dict[str, object], what: str) -> None:
    differing = list_differences(report, _changed(report, ending, **changes), _DEVICE)
    assert {difference.what for difference in differing} == {what}


def test_a_case_of_one_report_is_a_difference_except_among_common_cases(report: Report) -> None:
    shorter = dataclasses.replace(report, results=report.results[1:])
    first = report.results[0]
    missing = Difference(case_id=first.id, what="only in one", left=first.verdict.kind, right="not there")
    assert list_differences(report, shorter) == [missing]
    assert list_differences(shorter, report) == [dataclasses.replace(missing, left=missing.right, right=missing.left)]
    both = list_differences(report, _changed(shorter, _CRASH, kind="wrong"))
    assert {difference.what for difference in both} == {"only in one", "verdict"}
    assert [difference.what for difference in select_common_cases(both)] == ["verdict"]


def test_seconds_bytes_patience_and_what_an_older_report_lacks_do_not_count(report: Report) -> None:
    reason = next(result.verdict.reason for result in report.results if result.verdict.kind == "hang")
    other = _changed(report, _OK, seconds=1e9, wall_seconds=1e9, peak_extra_bytes=1, yielded=())
    assert list_differences(report, _changed(other, _HANG, reason=reason.replace("12 s", "30 s"))) == []


def test_another_device_is_a_difference_unless_it_is_ignored(report: Report) -> None:
    (crash,) = [result for result in report.results if result.id == _CRASH]
    other = _changed(report, _CRASH, reason=crash.verdict.reason.replace("cuda:0", "emulated:1"))
    assert [difference.what for difference in list_differences(report, other)] == ["reason"]
    assert list_differences(report, other, _DEVICE) == []


def test_verdicts_come_first_and_the_type_of_the_device_is_no_difference(report: Report) -> None:
    emulated = dataclasses.replace(report, device="emulated")
    of_device = _changed(emulated, _OK, yielded=({"dtensor float32 emulated": 25}, {"dtensor float32 emulated": 25}))
    here = _changed(report, _OK, yielded=({"dtensor float32 cuda": 25}, {"dtensor float32 cuda": 25}))
    assert list_differences(here, of_device) == []
    assert [each.what for each in list_differences(here, dataclasses.replace(of_device, device="cuda"))] == ["yielded"]
    on_cpu = _changed(of_device, _OK, yielded=({"dtensor float32 cpu": 25}, {"dtensor float32 emulated": 25}))
    worse = _changed(_changed(on_cpu, _HANG, kind="ok"), _CRASH, reason="RuntimeError: something else")
    found = [each.what for each in list_differences(here, worse)]
    assert (found[0], found[-1], {*found}) == ("verdict", "yielded", {"verdict", "reason", "yielded"})


def test_the_place_of_a_hang_depends_on_the_device(report: Report) -> None:
    other = _changed(report, _HANG, reason="no progress in stage extract for 12 s: rank 0 waited in full_tensor")
    assert list_differences(report, other, _DEVICE) == []
    assert {difference.what for difference in list_differences(report, other)} == {"reason"}


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "fsdp1-orig"])
def test_the_emulated_device_agrees_with_two_h200s_on_all_cases_without_races(strategy: str) -> None:
    """The message of ``lora.merged.read_late`` quotes weights that were trained, which a GPU rounds otherwise."""
    left, right = (read_report(_FULL / f"{machine}-{strategy}.json.gz") for machine in ("emulated", "2xh200"))
    assert len(left.results) == len(right.results) > 1700
    other = [
        difference
        for difference in list_differences(left, right, _DEVICE)
        if "nonblocking" not in difference.case_id
        and not (difference.case_id.endswith("lora.merged.read_late") and difference.what == "reason")
    ]
    assert other == []


def test_only_races_have_other_verdicts_on_two_h200s_in_the_default_matrix() -> None:
    left, right = (read_report(_FULL.parent / f"{machine}-all-cases.json.gz") for machine in ("emulated", "2xh200"))
    assert len(left.results) == len(right.results) > 2000
    found = list_differences(left, right, _DEVICE)
    assert {one.left for one in found if one.what == "verdict"} == {"race"}
    assert len(found) < 30
    assert {one.what for one in found} <= {"verdict", "reason", "ranks"}


@pytest.fixture(scope="module")
def files(report: Report, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A report, and the same without its second case and with another verdict of the first."""
    directory = tmp_path_factory.mktemp("files")
    left, right = directory / "left.json.gz", directory / "right.json"
    write_report(directory / "left.json", report)
    left.write_bytes(gzip.compress((directory / "left.json").read_bytes()))
    first, _, *others = report.results
    write_report(right, dataclasses.replace(report, results=(_with(first, {"kind": "wrong"}), *others)))
    return str(left), str(right)


def test_diff_ends_with_1_unless_only_one_report_has_the_cases(report: Report, files: tuple[str, str]) -> None:
    first, second = report.results[:2]
    done = doctor("report", "diff", *files)
    assert (done.code, [line.split("\t") for line in done.stdout.splitlines()]) == (
        1,
        [[first.id, "verdict", "ok", "wrong"], [second.id, "only in one", second.verdict.kind, "not there"]],
    )
    assert f"{len(report.results) - 2} of {len(report.results)} cases are the same" in done.stderr
    as_json = json.loads(doctor("report", "diff", "--json", *files).stdout)
    assert as_json[0] == {"case_id": first.id, "what": "verdict", "left": "ok", "right": "wrong"}
    assert doctor("report", "diff", files[0], files[0]).code == 0


def test_common_lists_a_case_of_only_one_report_without_counting_it(
    report: Report, files: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    shorter = tmp_path / "shorter.json"
    write_report(shorter, dataclasses.replace(report, results=report.results[1:]))
    assert [doctor("report", "diff", *common, files[0], str(shorter)).code for common in ((), ("--common",))] == [1, 0]
    assert doctor("report", "diff", "--common", *files).code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ignore", "time"), "'--ignore': 'time' is not one of device"),
        (("no-such-file.json",), "cannot read the report no-such-file.json"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(files: tuple[str, str], arguments: tuple[str, ...], words: str) -> None:
    done = doctor("report", "diff", files[0], *((files[1],) if arguments[0].startswith("--") else ()), *arguments)
    assert done.code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
