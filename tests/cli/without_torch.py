"""Runs the command line in an interpreter that has no torch: ``python tests/cli/without_torch.py``.

It needs the packages of the command line alone, not even pytest. It prints the options that the help of each command
has, as JSON, and ends with 1 and a sentence at the first command that does not do what it should.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}

import typer  # noqa: E402

from fsdp_doctor.cli import app  # noqa: E402, after the lines that it reads

_EXAMPLE = ROOT / "examples" / "verl-5995"
_REPORT = ROOT / "examples" / "reports" / "2xh200.json.gz"
# The names of an option in the help, with and without a frame.
_OPTIONS = re.compile(r"^[│\s*]*(--[a-z][a-z-]*(?:,\s*--[a-z][a-z-]*)*)", re.MULTILINE)


class Failed(Exception):
    pass


def _run(*arguments: str, code: int = 0) -> str:
    """Returns what the command prints. Raises Failed where it ends with another code."""
    stdout, stderr = io.StringIO(), io.StringIO()
    sys.argv = ["fsdp-doctor", *arguments]
    ended = 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            app.main()
        except SystemExit as end:
            ended = end.code if isinstance(end.code, int) else int(end.code is not None)
    if ended != code:
        raise Failed(f"{' '.join(arguments)} ended with {ended}, not {code}: {stdout.getvalue()}{stderr.getvalue()}")
    return stdout.getvalue()


def _expect(what: bool, sentence: str) -> None:
    if not what:
        raise Failed(sentence)


def _options() -> dict[str, list[str]]:
    """Maps each command to the options that its help prints."""
    options = {}
    commands: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app.app))]
    for words, command in commands:
        printed = _run(*words, "--help")
        inner = getattr(command, "commands", {})
        _expect(all(name in printed for name in inner), f"the help of fsdp-doctor {' '.join(words)} lacks a command")
        commands += [((*words, name), each) for name, each in inner.items()]
        options[" ".join(words)] = sorted(name.strip() for row in _OPTIONS.findall(printed) for name in row.split(","))
    return options


def _check_commands(directory: pathlib.Path) -> None:
    """Checks the commands that need no torch, with their arguments and options."""
    _expect(len(json.loads(_run("list", "--level", "quick", "--json"))) > 10, "list prints no cases")
    explained = json.loads(_run("explain", str(_EXAMPLE / "log.txt"), "--json"))
    _expect(bool(explained["matches"]), "explain finds nothing in a log that it knows")
    checked = _run("check", str(_EXAMPLE / "config.txt"), "--torch-version", "2.9", code=1)
    _expect("offload_policy" in checked, "check does not name the setting that fails")
    markdown = directory / "report.md"
    _run("report", "show", str(_REPORT), "--format", "markdown", "--output", str(markdown))
    _expect("fsdp2" in markdown.read_text(encoding="utf-8"), "report writes no case")
    _run("report", "diff", str(_REPORT), str(_REPORT))
    script = directory / "repro.py"
    _run("repro", "fsdp2/policy/staged/state_dict", "--out", str(script))
    compile(script.read_text(encoding="utf-8"), str(script), "exec")


def main() -> None:
    if importlib.util.find_spec("torch") is not None:
        raise SystemExit("torch is installed here, so that a command which needs it would not be noticed")
    try:
        print(json.dumps(_options()))
        with tempfile.TemporaryDirectory() as directory:
            _check_commands(pathlib.Path(directory))
    except Failed as failure:
        raise SystemExit(str(failure)) from None


if __name__ == "__main__":
    main()
