"""The report file while the run lasts, and reading it back."""

import contextlib
import dataclasses
import json
import os
import resource
import signal

import pytest

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.matrix.cases import Case, make_scenario
from fsdp_doctor.report import journal as journal_module
from fsdp_doctor.report.document import SCHEMA_VERSION, CaseResult, Report, convert_report_to_dict, make_case_fields
from fsdp_doctor.report.journal import Journal, name_journal, read_report, replace_file
from fsdp_doctor.report.writer import ReportWriter
from fsdp_doctor.verdict.classification import Verdict
from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Record

METHODS = ("state_dict", "dcp", "unshard", "from_local")


def result(method, kind="crash"):
    case = Case(make_scenario({"strategy": "fsdp2", "offload": "policy", "staging": "staged"}), method)
    failure = Failure(type="RuntimeError", message="it\nbroke \u2028 é \x00", traceback="Traceback\n", time=1.5)
    record = Record(
        case_id=case.id, stage="extract", failure=failure, problems=(Problem(kind="wrong", detail="w"),), done=True
    )
    return CaseResult(
        **make_case_fields(case),
        verdict=Verdict(kind=kind, reason="it broke", ranks=(0,), also=("leak: l",)),
        seconds=0.25,
        wall_seconds=1.5,
        ranks=(RankReport(rank=0, record=record),),
    )


RESULTS = tuple(result(method) for method in METHODS)


def report(*results, **fields):
    return Report(
        **{
            "version": "0.1.0",
            "created": "2026-01-01T00:00:00+00:00",
            "command": "fsdp-doctor probe",
            "device": "cpu",
            "world_size": 2,
            "num_selected": len(METHODS),
            "environment": {"torch": "2.9.0"},
            "results": results,
            **fields,
        }
    )


@pytest.fixture
def file(tmp_path):
    return tmp_path / "report.json"


@pytest.fixture
def start():
    """Starts journals, and lets go of their files when the test is over."""
    started = []

    def start(file, report):
        started.append(Journal(file, report))
        return started[-1]

    yield start
    for journal in started:
        with contextlib.suppress(DoctorFault):
            journal.close(report())


@pytest.fixture
def journal_file(tmp_path):
    return tmp_path / "report.json.journal"


@pytest.mark.parametrize("finished", range(len(METHODS) + 1))
def test_a_run_that_ends_at_any_time_leaves_every_finished_result(start, file, finished):
    journal = start(file, report())
    for one in RESULTS[:finished]:
        journal.add(one)
    found = read_report(file)
    assert found == report(*RESULTS[:finished])
    assert not found.complete


def test_a_result_is_on_disk_as_soon_as_it_was_added(start, file, journal_file):
    journal = start(file, report())
    for number, one in enumerate(RESULTS, start=1):
        journal.add(one)
        assert journal_file.read_text().count("\n") == number


@pytest.mark.parametrize("kept", range(len(METHODS)))
def test_a_resumed_run_keeps_the_results_from_before(start, file, kept):
    journal = start(file, report(*RESULTS[:kept]))
    assert read_report(file).results == RESULTS[:kept]
    journal.add(RESULTS[kept])
    assert read_report(file).results == RESULTS[: kept + 1]


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
def test_a_last_journal_line_that_is_half_written_is_dropped(start, file, journal_file, cut):
    journal = start(file, report())
    for one in RESULTS:
        journal.add(one)
    journal_file.write_bytes(journal_file.read_bytes()[: -1 - cut])
    assert read_report(file).results == RESULTS[:-1]


@pytest.mark.parametrize(
    "tail", [b"\x00\x00\x00\n", b"{}\n", b"[]\n", b"null\n", b'"text"\n', b"7\n", b'{"id": 1}\n', b"\n", b"\xff\xfe\n"]
)
def test_remains_of_a_crash_at_the_end_of_the_journal_are_dropped(start, file, journal_file, tail):
    journal = start(file, report())
    journal.add(RESULTS[0])
    with open(journal_file, "ab") as end:
        end.write(tail)
    assert read_report(file).results == RESULTS[:1]


def test_a_partial_report_whose_journal_is_gone_has_the_results_it_holds(start, file, journal_file):
    start(file, report(*RESULTS[:2]))
    journal_file.unlink()
    assert read_report(file).results == RESULTS[:2]


def test_a_journal_with_fewer_results_than_the_report_does_not_shorten_it(start, file, journal_file):
    start(file, report(*RESULTS[:3]))
    journal_file.write_text(journal_file.read_text().splitlines()[0] + "\n")
    assert read_report(file).results == RESULTS[:3]


def test_the_end_of_a_run_leaves_the_whole_report_and_nothing_else(start, tmp_path, file):
    journal = start(file, report())
    for one in RESULTS:
        journal.add(one)
    whole = report(*RESULTS, complete=True, seconds=3.5)
    journal.close(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert read_report(file) == whole
    assert json.loads(file.read_text()) == json.loads(json.dumps(convert_report_to_dict(whole)))


def test_a_complete_report_ignores_a_leftover_journal(start, file, journal_file):
    journal = start(file, report())
    for one in RESULTS:
        journal.add(one)
    left = journal_file.read_bytes()
    journal.close(report(RESULTS[0], complete=True, num_selected=1))
    journal_file.write_bytes(left)
    assert read_report(file).results == RESULTS[:1]


def test_a_new_run_forgets_the_journal_of_the_one_before(start, file):
    before = start(file, report())
    for one in RESULTS:
        before.add(one)
    start(file, report())
    assert read_report(file).results == ()


def written(**changes):
    data = convert_report_to_dict(report(RESULTS[0], complete=True)) | changes
    return json.dumps({name: value for name, value in data.items() if value is not ...})


def written_result(**changes):
    data = json.loads(written())
    data["results"][0] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is not JSON"),
        ("no JSON\nat all", "is not JSON"),
        (written()[:100], "is not JSON"),
        (b"\xff\xfe\x00", "cannot read the report"),
        ("[]", "its 'schema' is not"),
        ("null", "its 'schema' is not"),
        ('"fsdp-doctor/report"', "its 'schema' is not"),
        ("{}", "its 'schema' is not"),
        (written(schema="other/report"), "its 'schema' is not"),
        (written(schema=...), "its 'schema' is not"),
        (written(schema_version=SCHEMA_VERSION + 1), "upgrade fsdp-doctor"),
        (written(schema_version="1"), "has schema version 1"),
        (written(schema_version=...), "has schema version None"),
        (written(complete=...), "is a damaged report"),
        (written(results=...), "is a damaged report"),
        (written(results=None), "is a damaged report"),
        (written(results=[1]), "is a damaged report"),
        (written(notes=None), "is a damaged report"),
        (written_result(scenario={"strategy": "fsdp2"}), "is a damaged report"),
        (written_result(verdict=None), "is a damaged report"),
        (written_result(ranks=[1]), "is a damaged report"),
        (written_result(ranks=["text"]), "is a damaged report"),
        (written_result(ranks=[{"rank": 0, "record": "text"}]), "is a damaged report"),
    ],
)
def test_a_foreign_file_is_a_usage_error_of_one_sentence(file, content, complaint):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        read_report(file)
    message = str(caught.value)
    assert complaint in message
    assert str(file) in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "reason"), [("none.json", "No such file"), (".", "Is a directory")])
def test_an_unreadable_report_is_a_usage_error_with_the_reason(tmp_path, name, reason):
    with pytest.raises(UsageError, match=rf"^cannot read the report .*: {reason}[^\n]*$"):
        read_report(tmp_path / name)


@pytest.mark.parametrize("parent", ["missing", "a file"])
def test_a_directory_that_cannot_be_written_is_the_doctors_fault(start, tmp_path, parent):
    (tmp_path / "a file").write_text("")
    file = tmp_path / parent / "report.json"
    with pytest.raises(DoctorFault) as caught:
        start(file, report())
    assert str(caught.value).startswith(f"cannot write {file}: ")
    assert "\n" not in str(caught.value)


def test_a_pipe_or_a_device_is_not_replaced_by_a_report(start, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DoctorFault, match="not a regular file"):
        start(pipe, report())
    assert pipe.is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_report_that_cannot_be_placed_leaves_no_other_file_behind(start, tmp_path, file):
    file.mkdir()
    with pytest.raises(DoctorFault):
        start(file, report())
    assert list(tmp_path.iterdir()) == [file]


def test_a_journal_that_cannot_be_opened_is_the_doctors_fault(start, file, journal_file):
    journal_file.mkdir()
    with pytest.raises(DoctorFault, match="cannot write"):
        start(file, report())


def test_a_full_disk_is_the_doctors_fault_and_leaves_the_report_readable(start, file, journal_file):
    journal_file.symlink_to("/dev/full")
    journal = start(file, report())
    with pytest.raises(DoctorFault, match="No space left on device"):
        journal.add(RESULTS[0])
    journal_file.unlink()
    journal.close(report(*RESULTS, complete=True))
    assert read_report(file) == report(*RESULTS, complete=True)


def test_the_last_report_that_cannot_be_written_leaves_the_journal(start, tmp_path):
    directory = tmp_path / "directory"
    directory.mkdir()
    file = directory / "report.json"
    journal = start(file, report())
    for one in RESULTS:
        journal.add(one)
    (directory / "report.json.new").mkdir()
    with pytest.raises(DoctorFault):
        journal.close(report(*RESULTS, complete=True))
    assert read_report(file) == report(*RESULTS)


def test_a_report_of_another_kind_of_end_comes_back_whole(start, file):
    ended = report(
        *RESULTS[:2],
        dataclasses.replace(RESULTS[2], confirmation=Verdict(kind="ok"), ranks=()),
        ended="stopped by SIGINT",
        notes=("a note",),
        rerun_options="--nproc 2",
        seconds=1.25,
    )
    start(file, report()).close(ended)
    assert read_report(file) == ended


@contextlib.contextmanager
def no_file_above_a_page():
    """The kernel refuses to write more, as a full disk does; to pytest's own output, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, file):
    replace_file(file, "before")
    with no_file_above_a_page(), pytest.raises(OSError, match="File too large"):
        replace_file(file, b"x" * 100_000)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


# A journal belongs to one run: the results of an older run are never taken for this run's.

OLDER, NEW = RESULTS[:3], RESULTS[3]
CASES = tuple(each.case for each in RESULTS)


@pytest.fixture
def killed(file, journal_file):
    """A partial report whose run was killed: its results are in its journal."""
    older = Journal(file, report())
    for each in OLDER:
        older.add(each)
    left = {path: path.read_bytes() for path in (file, journal_file)}
    older.close(report())
    for path, content in left.items():
        path.write_bytes(content)
    assert read_report(file).results == OLDER
    return file


def test_a_run_stopped_before_its_workers_start_has_no_older_results(killed):
    made, fault = ReportWriter(report(), CASES, {"json": killed}).finish(ended="stopped by SIGINT")
    assert fault is None
    assert read_report(killed) == made
    assert made.results == ()
    assert not name_journal(killed).exists()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_run_killed_as_it_opens_its_report_keeps_earlier_results(killed, monkeypatch, dies, goes_on):
    replace = journal_module.replace_file

    def replace_or_die(path, text):
        if dies == "after":
            replace(path, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal_module, "replace_file", replace_or_die)
    with pytest.raises(KeyboardInterrupt):
        ReportWriter(read_report(killed) if goes_on else report(), CASES, {"json": killed}).open({})
    assert read_report(killed).results == (OLDER if goes_on else ())


def test_a_resumed_run_stopped_before_its_workers_start_keeps_the_results(killed):
    ReportWriter(read_report(killed), CASES, {"json": killed}).finish(ended="stopped by SIGINT")
    assert read_report(killed).results == OLDER
    assert not name_journal(killed).exists()


def test_a_new_run_has_its_own_results_alone(killed):
    writer = ReportWriter(report(), CASES, {"json": killed})
    writer.open({"torch": "2.13.0"})
    assert read_report(killed).results == ()
    writer.add(NEW)
    assert read_report(killed).results == (NEW,)
    made, _ = writer.finish(ended="stopped by SIGTERM")
    assert dataclasses.replace(made, seconds=0.0) == dataclasses.replace(read_report(killed), seconds=0.0)
    assert (made.results, made.complete, made.ended) == ((NEW,), False, "stopped by SIGTERM")
