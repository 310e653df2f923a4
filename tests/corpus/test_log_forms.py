"""The answer to a log does not depend on the form in which it was pasted: indented, wrapped, prefixed, encoded."""

from __future__ import annotations

import gzip
import html
import json
import pathlib
import sys
import textwrap
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from score_logs import HERE, logs

from fsdp_doctor.explain import explain

_STAMP = "2026-11-20T10:00:00.123456789Z"


def _with_prefix(prefix: str, suffix: str = "") -> Callable[[str], str]:
    return lambda log: "".join(f"{prefix}{line}{suffix}\n" for line in log.splitlines())


def _wrapped(width: int) -> Callable[[str], str]:
    """Wraps as a terminal of that width does."""

    def wrap(log: str) -> str:
        lines = (line.expandtabs() for line in log.splitlines())
        return "".join(line[at : at + width] + "\n" for line in lines for at in range(0, len(line) or 1, width))

    return wrap


def _wrapped_at_words(log: str) -> str:
    """Wraps as an editor does at 80 columns."""
    lines = (textwrap.wrap(line, 80, drop_whitespace=True, break_on_hyphens=False) or [""] for line in log.splitlines())
    return "".join(f"{piece}\n" for line in lines for piece in line)


def _as_json_lines(log: str) -> str:
    """Makes an object of each line, as a collector does."""
    rows = ({"time": _STAMP, "level": "ERROR", "message": line} for line in log.splitlines())
    return "".join(json.dumps(row) + "\n" for row in rows)


def _as_notebook(log: str, indent: int | None = 1) -> str:
    output = {"output_type": "stream", "name": "stderr", "text": log.splitlines(keepends=True)}
    cell = {"cell_type": "code", "metadata": {}, "source": ["run()"], "outputs": [output]}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=indent) + "\n"


_FORMS: dict[str, Callable[[str], str]] = {
    **{f"indented by {number}": _with_prefix(" " * number) for number in (1, 2, 4)},
    "indented by a tab": _with_prefix("\t"),
    **{f"wrapped at {width}": _wrapped(width) for width in (80, 100)},
    "quoted": _with_prefix("> "),
    "Ray": _with_prefix("(WorkerDict pid=812, ip=10.0.0.1) "),
    "Ray with colours": _with_prefix("\x1b[36m(WorkerDict pid=812)\x1b[0m "),
    "Ray without its escapes": _with_prefix("[36m(WorkerDict pid=812)[0m "),
    "srun": _with_prefix("0: "),
    "Kubernetes' files": _with_prefix(f"{_STAMP} stderr F "),
    "kubectl": _with_prefix("[pod/train-0/pytorch] "),
    "stern": _with_prefix("train-0 pytorch "),
    "Docker": _with_prefix(f"{_STAMP} "),
    "compose": _with_prefix("trainer-1  | "),
    "pytest": _with_prefix("E   "),
    "torchrun": _with_prefix("[rank0]: "),
    "torchrun's tee": _with_prefix("[default0]:"),
    "GitHub's actions": _with_prefix("2026-11-20T10:00:00.1234567Z "),
    "colours": _with_prefix("\x1b[31m", "\x1b[0m"),
    "JSON lines": _as_json_lines,
    "an object": lambda log: json.dumps({"level": "error", "exc_info": log}) + "\n",
    "a JSON string": lambda log: json.dumps(log) + "\n",
    "a container's file": lambda log: "".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": _STAMP}) + "\n" for line in log.splitlines()
    ),
    "a notebook": _as_notebook,
    "a notebook in one line": lambda log: _as_notebook(log, None),
    "HTML": lambda log: f"<html><body><pre>\n{html.escape(log)}</pre></body></html>\n",
    "HTML with breaks": lambda log: "<p>" + "<br/>\n".join(html.escape(log).splitlines()) + "</p>\n",
    "a coloured notebook's HTML": lambda log: "".join(
        f'<span class="ansi-red-fg">{html.escape(line)}</span>\n' for line in log.splitlines()
    ),
    "wrapped at words": _wrapped_at_words,
    "cat -n": lambda log: "".join(f"{n:6}\t{line}\n" for n, line in enumerate(log.splitlines(), 1)),
    "grep -n": lambda log: "".join(f"{n}:{line}\n" for n, line in enumerate(log.splitlines(), 1)),
}
_ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "Windows' line ends": lambda log: log.replace("\n", "\r\n").encode(),
    "UTF-8 with a mark": lambda log: log.encode("utf-8-sig"),
    "UTF-16": lambda log: log.encode("utf-16"),
    "UTF-16 without a mark": lambda log: log.encode("utf-16-le"),
    "gzip": lambda log: gzip.compress(log.encode()),
}
_READERS: dict[str, Callable[[str], bytes]] = {
    **{name: lambda log, form=form: form(log).encode() for name, form in _FORMS.items()},  # type: ignore[misc]
    **_ENCODINGS,
}


def _answer(data: bytes, file: pathlib.Path) -> tuple[str, str | None, str]:
    # A file that is written anew is flushed to the disk, which takes longer than the explanation; a new one is not.
    file.unlink(missing_ok=True)
    file.write_bytes(data)
    explanation = explain([file])
    first = explanation.matches[0].entry.id if explanation.matches else ""
    return explanation.showing, explanation.grade, first


def test_the_answer_does_not_depend_on_the_form_of_the_log(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log"
    changed = []
    for row in logs():
        log = (HERE / "logs" / row["file"]).read_text(encoding="utf-8")
        plain = _answer(log.encode(), file)
        answers = {form: _answer(read(log), file) for form, read in _READERS.items()}
        if plain[0] in ("nothing", "consequences"):
            # It names the rank, which is what a log of a line or two lacked.
            del answers["torchrun"]
        changed += [(form, row["file"], plain, answer) for form, answer in answers.items() if answer != plain]
    # Lines that were broken between words may look as if they were broken within words.
    doubtful = [change for change in changed if change[0] == "wrapped at words"]
    assert [change for change in changed if change not in doubtful] == []
    assert len(doubtful) <= 0.08 * len(logs())
    assert [change for change in doubtful if change[3][1] == "known"] == []
