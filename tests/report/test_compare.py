"""Comparing two reports: each thing that can differ is found, and nothing that may."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import pytest
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.report.comparison import Difference, differences, sentence
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.verdict.classification import Verdict

_FILE = ROOT / "examples" / "reports" / "full" / "2xh200-fsdp2.json.gz"
_CRASH, _OK, _HANG = "fsdp2/policy/staged/state_dict", "fsdp2/none/unstaged/state_dict", "uneven/from_local"
_DEVICE = frozenset({"device"})


@pytest.fixture(scope="module")
def report() -> Report:
    found = read_report(_FILE)
    return dataclasses.replace(found, results=tuple(r for r in found.results if r.id.endswith((_CRASH, _OK, _HANG))))


def _changed(report: Report, ending: str, **changes: object) -> Report:
    """The report with fields of one case, or of its verdict, put anew."""
    results = [_with(result, changes) if result.id.endswith(ending) else result for result in report.results]
    return dataclasses.replace(report, results=tuple(results))


def _with(result: CaseResult, changes: dict[str, object]) -> CaseResult:
    of_verdict = {field.name for field in dataclasses.fields(Verdict)}
    verdict = dataclasses.replace(result.verdict, **{k: v for k, v in changes.items() if k in of_verdict})
    own = {name: value for name, value in changes.items() if name not in of_verdict}
    return dataclasses.replace(result, verdict=verdict, **own)


def test_a_report_is_the_same_as_itself(report: Report) -> None:
    assert differences(report, report) == []
    assert "cases are the same on cuda and cuda" in sentence([], report, report)


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
def test_what_differs_is_found(report: Report, ending: str, changes: dict[str, object], what: str) -> None:
    found = differences(report, _changed(report, ending, **changes), _DEVICE)
    assert {difference.what for difference in found} == {what}


def test_a_case_that_only_one_has_is_a_difference(report: Report) -> None:
    shorter = dataclasses.replace(report, results=report.results[1:])
    missing = Difference(
        case_id=report.results[0].id, what="only in one", left=report.results[0].verdict.kind, right="not there"
    )
    assert differences(report, shorter) == [missing]
    assert differences(shorter, report) == [dataclasses.replace(missing, left=missing.right, right=missing.left)]


def test_seconds_bytes_and_patience_do_not_count(report: Report) -> None:
    reason = next(result.verdict.reason for result in report.results if result.verdict.kind == "hang")
    other = _changed(report, _OK, seconds=1e9, wall_seconds=1e9, peak_extra_bytes=1)
    assert differences(report, _changed(other, _HANG, reason=reason.replace("12 s", "30 s"))) == []


def test_another_device_is_a_difference_unless_it_is_ignored(report: Report) -> None:
    (crash,) = [result for result in report.results if result.id == _CRASH]
    other = _changed(report, _CRASH, reason=crash.verdict.reason.replace("cuda:0", "emulated:1"))
    assert [difference.what for difference in differences(report, other)] == ["reason"]
    assert differences(report, other, _DEVICE) == []


def test_where_a_rank_hangs_is_of_the_device(report: Report) -> None:
    other = _changed(report, _HANG, reason="no progress in stage extract for 12 s: rank 0 waited in full_tensor")
    assert differences(report, other, _DEVICE) == []
    assert {difference.what for difference in differences(report, other)} == {"reason"}


def test_a_report_from_before_yielded_was_kept_can_be_compared(report: Report) -> None:
    assert differences(report, _changed(report, _OK, yielded=())) == []


@pytest.fixture(scope="module")
def files(report: Report, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The same report twice, with one verdict changed in the second."""
    directory = tmp_path_factory.mktemp("files")
    data = json.loads(gzip.decompress(_FILE.read_bytes()))
    left, right = directory / "left.json.gz", directory / "right.json"
    left.write_bytes(gzip.compress(json.dumps(data).encode()))
    data["results"][0]["verdict"]["kind"] = "wrong"
    right.write_text(json.dumps(data))
    return left, right


def test_the_command_prints_a_line_for_each_difference_and_ends_with_1(
    files: tuple[pathlib.Path, pathlib.Path],
) -> None:
    done = doctor("report", "diff", *map(str, files))
    assert done.code == 1
    assert done.stdout.splitlines() == ["fsdp2/none/unstaged/state_dict\tverdict\tok\twrong"]
    assert "2339 of 2340 cases are the same" in done.stderr
    as_json = json.loads(doctor("report", "diff", "--json", *map(str, files)).stdout)
    assert as_json == [{"case_id": _OK, "what": "verdict", "left": "ok", "right": "wrong"}]


def test_the_command_ends_with_0_where_nothing_differs(files: tuple[pathlib.Path, pathlib.Path]) -> None:
    done = doctor("report", "diff", str(files[0]), str(files[0]))
    assert (done.code, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--ignore", "time"), "'--ignore': 'time' is not one of device"),
        (("no-such-file.json",), "cannot read the report no-such-file.json"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    files: tuple[pathlib.Path, pathlib.Path], arguments: tuple[str, ...], sentence: str
) -> None:
    left, right = (str(file) for file in files)
    done = doctor("report", "diff", left, *((right,) if arguments[0].startswith("--") else ()), *arguments)
    assert done.code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_gzip_file_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json.gz"
    file.write_bytes(_FILE.read_bytes()[:1000])
    done = doctor("report", "show", str(file))
    assert done.code == 2
    assert "cannot read the report" in done.stderr
