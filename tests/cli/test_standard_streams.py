"""Standard streams that are closed, full, or no longer read: one sentence and an exit code, for every command."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from program import ROOT, Run, run

from fsdp_doctor.report.journal import read_report

_REPORT = str(ROOT / "examples" / "reports" / "2xh200.json.gz")
_CONFIG = str(ROOT / "examples" / "verl-5995" / "config.txt")
_LOG = str(ROOT / "examples" / "verl-5995" / "log.txt")
_CASE = "fsdp2/none/unstaged/state_dict"
# Commands that print, each in a way of its own.
_PRINTING = [
    ("--help",),
    ("list", "--full", "--json"),
    ("explain", _LOG),
    ("check", _CONFIG),
    ("repro", "fsdp2/policy/staged/state_dict"),
    ("report", "show", _REPORT),
]
_PROBE = ("probe", "--device", "cpu", "--nproc", "1", "--case", _CASE)


def _run(redirection: str, *arguments: str) -> Run:
    """``fsdp-doctor ARGUMENTS REDIRECTION`` in a shell."""
    return run("bash", "-c", f'exec "$0" -m fsdp_doctor "$@" {redirection}', sys.executable, *arguments)


def _run_into_a_closed_pipe(*arguments: str) -> tuple[int, str]:
    """The exit code and stderr where the reader of stdout is gone before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_doctor", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(write_end)
    return done.returncode, done.stderr


def _sentences(stderr: str) -> list[str]:
    for trace in ("Traceback", "Exception ignored", "BrokenPipeError", "OSError"):
        assert trace not in stderr, stderr
    return [line.removeprefix("fsdp-doctor: ") for line in stderr.splitlines() if line.startswith("fsdp-doctor: ")]


@pytest.mark.parametrize("arguments", _PRINTING, ids=" ".join)
def test_a_full_disk_is_one_sentence_and_exit_code_4(arguments: tuple[str, ...]) -> None:
    done = _run(">/dev/full", *arguments)
    assert _sentences(done.stderr) == ["cannot write to standard output: No space left on device"]
    assert done.code == 4


@pytest.mark.parametrize("arguments", _PRINTING, ids=" ".join)
def test_a_reader_that_has_ended_is_exit_code_141_without_a_word(arguments: tuple[str, ...]) -> None:
    code, stderr = _run_into_a_closed_pipe(*arguments)
    assert _sentences(stderr) == []
    assert code == 141


def test_the_first_line_of_a_long_list_can_be_taken() -> None:
    done = _run("| head -1; exit ${PIPESTATUS[0]}", "list", "--full", "--json")
    assert done.stdout == "[\n"
    assert _sentences(done.stderr) == []
    assert done.code == 141


def test_the_count_of_a_list_has_its_own_line_in_a_pipe() -> None:
    done = _run("2>&1 | cat", "list", "--level", "quick")
    *ids, count = done.stdout.splitlines()
    assert count == f"{len(ids)} cases in {len({case.rpartition('/')[0] for case in ids})} scenarios"


@pytest.mark.parametrize("arguments", [("list",), ("explain", "--list"), ("--help",)], ids=" ".join)
def test_a_closed_standard_output_is_one_sentence_and_exit_code_4(arguments: tuple[str, ...]) -> None:
    done = _run(">&-", *arguments)
    assert _sentences(done.stderr) == ["cannot write to standard output: Bad file descriptor"]
    assert done.code == 4


@pytest.mark.parametrize("arguments", [("check", "-"), ("explain",), ("explain", "-")], ids=" ".join)
def test_a_closed_standard_input_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = _run("<&-", *arguments)
    assert _sentences(done.stderr) == ["standard input is closed; give a file instead of -"]
    assert done.code == 2


def test_a_standard_input_that_cannot_be_read_is_a_usage_error() -> None:
    done = _run("0>/dev/null", "check", "-")
    [sentence] = _sentences(done.stderr)
    assert "standard input" in sentence
    assert (done.code, done.stdout) == (2, "")


def test_what_does_not_read_standard_input_does_without() -> None:
    done = _run("<&-", "list")
    assert done.code == 0
    assert done.stdout.startswith("fsdp2/")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_unwritable_messages_change_neither_the_output_nor_the_exit_code(redirection: str) -> None:
    done = _run(redirection, "list")
    assert done.code == 0
    assert done.stdout.splitlines()[0].startswith("fsdp2/")
    assert not [line for line in done.stdout.splitlines() if line.endswith("scenarios")]
    assert _run(redirection, "list", "--offload", "polcy").code == 2


def test_without_any_stream_the_exit_code_is_still_right(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "repro.py"
    assert _run("<&- >&- 2>&-", "repro", "fsdp2/policy/staged/state_dict", "--out", str(file)).code == 0
    assert file.read_text().startswith('"""')
    assert _run("<&- >&- 2>&-", "list", "--offload", "polcy").code == 2
    assert _run("<&- >&- 2>&-", "list").code == 4


def test_a_probe_that_cannot_print_its_report_keeps_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    done = _run(">/dev/full", *_PROBE, "--json", str(file))
    assert _sentences(done.stderr) == ["cannot write to standard output: No space left on device"]
    assert done.code == 4
    assert read_report(file).complete


def test_a_probe_whose_reader_has_ended_keeps_its_report(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    code, stderr = _run_into_a_closed_pipe(*_PROBE, "--json", str(file))
    assert _sentences(stderr) == []
    assert code == 141
    assert read_report(file).complete
