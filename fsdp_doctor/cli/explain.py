"""``fsdp-doctor explain``: finds the root cause in a log, or prints the catalogue."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import sys
from typing import Annotated

import typer

from fsdp_doctor.cli.output import replace_unprintable
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.machine.terminal import measure_width

EXIT_CODES = (
    "Exit codes: 0 the catalogue knows the cause; 1 the catalogue does not know the cause; 2 usage; 4 the output "
    "cannot be written."
)


def explain(
    *,
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|-|ENTRY]...",
            help="Logs or tracebacks; - is standard input, the default. Or an entry of the catalogue: FD001.",
            show_default=False,
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--list", help="List the catalogue instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Find the root cause in the log of a job, and its remedy.

    Prints the cause's entry in the catalogue of known failures: cause, remedy, references, and a case that reproduces
    it.
    """
    if all_ and logs:
        raise UsageError("--list prints the catalogue and reads no file; use it without a FILE")
    if logs and logs.count("-") > 1:
        raise UsageError("standard input can be read only once; give a single -")
    replace_unprintable("backslashreplace")
    width = measure_width()
    entry = logs[0] if logs and len(logs) == 1 and _names_entry(logs[0]) else None
    if all_ or entry is not None:
        _print_catalogue(entry, as_json=as_json, width=width)
    else:
        _print_explanation(
            [None if log == "-" else pathlib.Path(log) for log in logs or ["-"]], as_json=as_json, width=width
        )


def _mark_answer(rendered: str) -> str:
    """Makes the first paragraph, which is the answer and its remedy, bold on a terminal."""
    answer, gap, rest = rendered.partition("\n\n")
    return f"\x1b[1m{answer}\x1b[0m{gap}{rest}"


def _names_entry(word: str) -> bool:
    """Returns whether a word looks like an id or a short code of the catalogue, and no file has this name."""
    return re.fullmatch(r"\w[\w-]*", word) is not None and not pathlib.Path(word).exists()


def _print_catalogue(entry: str | None, *, as_json: bool, width: int) -> None:
    from fsdp_doctor.explain import text
    from fsdp_doctor.known import catalogue

    chosen = catalogue.read_catalogue() if entry is None else (catalogue.find_entry(entry),)
    if as_json:
        print(json.dumps([text.convert_entry_to_dict(known) for known in chosen], indent=1))
    elif entry is not None:
        print("\n".join(text.render_entry(chosen[0], width)))
    else:
        for known in chosen:
            print(known.short_code, known.id, known.verdict, known.evidence, known.title, sep="\t")


def _print_explanation(logs: list[pathlib.Path | None], *, as_json: bool, width: int) -> None:
    from fsdp_doctor.explain import explain, text

    # A log of thousands of failures makes no cycles; to look for them as often as usual takes a fifth of the time.
    gc.set_threshold(20_000)
    explanation = explain(logs)
    if as_json:
        print(text.render_json(explanation))
    else:
        rendered = text.render_text(explanation, width)
        is_marked = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        sys.stdout.write(_mark_answer(rendered) if is_marked else rendered)
    raise SystemExit(EXIT_OK if explanation.entry is not None else EXIT_BAD_VERDICT)
