"""Whatever a path raises is a crash with the name of its type, and ends no worker."""

from __future__ import annotations

import time

import pytest
from faults import exceptions
from program import Run, probe

from fsdp_doctor.verdict.tracebacks import failure_from

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged")
_REASONS = {
    "unprintable": "Unprintable: (its message cannot be read: ValueError was raised)",
    "from_unprintable": "RuntimeError: what came of it",
    "without_notes": "WithoutNotes: the text",
    "ends_whoever_reads_it": "EndsWhoeverReadsIt: (its message cannot be read: SystemExit was raised)",
    "of_its_own_kind": "OfItsOwnKind: the text",
    "keyboard_interrupt": "KeyboardInterrupt",
    "generator_exit": "GeneratorExit: the text",
    "generator_exit_while_it_yields": "GeneratorExit: the text",
    "enormous": "RuntimeError: begins soxxx",
    "no_unicode": "RuntimeError: half a pair: \\ud800",
    "deep": "RecursionError: maximum recursion depth exceeded",
    "long_chain": "RuntimeError: the text",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = [word for name in (*_REASONS, "healthy") for word in ("--path", f"faults.exceptions:{name}")]
    directory = tmp_path_factory.mktemp("exceptions")
    markdown = ("--markdown", str(directory / "report.md"))
    return probe(directory, *_ONE_SCENARIO, *paths, "-k", "exceptions", *markdown)


@pytest.mark.parametrize("name", _REASONS)
def test_it_is_a_crash_with_the_types_name(run: Run, name: str) -> None:
    verdict = run.result(f":{name}").verdict
    assert (verdict.kind, verdict.ranks) == ("crash", (0, 1)), verdict
    assert verdict.reason.startswith(_REASONS[name])


@pytest.mark.parametrize("name", _REASONS)
def test_its_record_is_no_longer_than_one_can_read(run: Run, name: str) -> None:
    record = run.rank(f":{name}", 1).record
    assert record is not None
    assert record.failure is not None
    assert len(record.failure.message) <= 4_000
    assert len(record.failure.traceback) <= 16_000


def test_the_case_after_them_is_ok_and_every_format_is_written(run: Run) -> None:
    assert run.kind(":healthy") == "ok"
    assert run.code == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert run.left == []


@pytest.mark.parametrize("name", ["unprintable", "without_notes", "ends_whoever_reads_it"])
def test_its_traceback_says_where_it_was_raised(run: Run, name: str) -> None:
    record = run.rank(f":{name}", 0).record
    assert record is not None
    assert record.failure is not None
    assert f"in {name}" in record.failure.traceback


def test_an_enormous_text_costs_no_time() -> None:
    try:
        exceptions.enormous(None)
    except RuntimeError as error:
        start = time.perf_counter()
        failure_from(error)
        assert time.perf_counter() - start < 2
