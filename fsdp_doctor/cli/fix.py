"""``fsdp-doctor fix``: runs a user's job with functions of its framework replaced by this library's."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli.options import declare_output_file
from fsdp_doctor.cli.output import write
from fsdp_doctor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_doctor.fixes.sources import FixedFunction

EXIT_CODES = (
    "Exit codes: the job's own; 1 if the job ended with 0 but a rank had no fix, or sent tensors that differ "
    "from the model's; 2 usage; 3 a fix was refused, or none was called; 4 the doctor failed."
)


def fix(
    *,
    framework: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The job's framework. Can be repeated.  [default: the installed framework]"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ID", help="Apply only this fix. Can be repeated.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the first sync with the model, by fingerprints.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be replaced, and run nothing.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Write the fixes of a framework as a patch of the installed release.")
    ] = False,
    json_file: Annotated[
        pathlib.Path | None, declare_output_file("--json", help="Write what the ranks reported as JSON to this file.")
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FRAMEWORK | -- COMMAND]",
            help="The command of the job; with --diff or --dry-run, a framework.",
        ),
    ] = None,
) -> None:
    """Run a job with its framework's broken functions replaced, and say on which ranks they were called.

    The job needs no change, and no file of the framework is changed. Functions whose source is not known are refused.
    """
    from fsdp_doctor.fixes.fixed_job import find_fixed_functions, run_with_fixes
    from fsdp_doctor.fixes.patches import render_patch

    words = command or []
    if diff:
        if len(words) > 1 or (words and framework):
            raise UsageError("--diff takes one framework, for example `fsdp-doctor fix verl --diff`")
        functions = find_fixed_functions(words or framework or [], only or [])
        patch = render_patch(functions)
        write(None, patch.text)
        for id in patch.importing:
            print(f"fsdp-doctor: fix {id} imports fsdp_doctor in the patched framework", file=sys.stderr)
        return
    if not words and not dry_run:
        raise UsageError("no job: write its command after --, for example `fsdp-doctor fix -- torchrun train.py`")
    named = _read_framework(words, framework or [], dry_run=dry_run)
    functions = find_fixed_functions(named, only or [])
    if dry_run:
        write(None, "\n".join(_describe(function) for function in functions))
        return
    done = run_with_fixes(words, functions, verify=verify)
    for sentence in done.sentences:
        print(f"fsdp-doctor: {sentence}", file=sys.stderr)
    if json_file is not None:
        write(json_file, json.dumps(dataclasses.asdict(done), indent=2) + "\n")
    raise SystemExit(done.exit_code)


def _read_framework(words: Sequence[str], chosen: Sequence[str], *, dry_run: bool) -> Sequence[str]:
    """Returns the frameworks whose fixes are wanted: those chosen, or with --dry-run the framework in ``words``.

    Raises UsageError if a framework's name stands in the place of the job's command. With --dry-run, raises UsageError
    for a single word that is neither a framework nor a program, and for a framework in ``words`` if ``chosen`` has
    frameworks, too.
    """
    from fsdp_doctor.fixes.entry import FIXES, list_fixes

    if not words:
        return chosen
    name, *rest = words
    is_framework = name in {fix.framework for fix in FIXES}
    if dry_run and not rest and (is_framework or shutil.which(name) is None):
        list_fixes(name)
        if chosen:
            raise UsageError("--dry-run takes one framework, for example `fsdp-doctor fix verl --dry-run`")
        return words
    if is_framework and (not rest or shutil.which(name) is None):
        typed = f"fsdp-doctor fix --framework {name} -- {shlex.join(rest) or 'torchrun train.py'}"
        raise UsageError(f"{name} is a framework, not the command of a job: type `{typed}`")
    return chosen


def _describe(function: FixedFunction) -> str:
    fix = function.fix
    facts = {
        "replaces": f"{fix.target} of {fix.distribution} {function.version}, with the source of {function.release}",
        "mends": ", ".join(fix.mends),
        "gives": fix.promises,
        "leaves": f"to the original: {fix.leaves}",
    }
    return "".join([f"{fix.id}\n", *(f"  {name:<9} {text}\n" for name, text in facts.items())])
