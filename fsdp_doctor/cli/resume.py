"""``fsdp-doctor resume``: checks that a resumed run of a user's job equals an uninterrupted run."""

from __future__ import annotations

import pathlib
import shlex
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_doctor.cli.options import declare_choice, declare_output_file
from fsdp_doctor.cli.output import write
from fsdp_doctor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_doctor.resume.runs import RunName, UserJob, UserJobRun

EXIT_CODES = (
    "Exit codes: 0 the resumed run is the same run; 1 it is another run; 2 usage, or no answer (a run "
    "failed, or was not seen); 3 two equal runs of the program differ; 4 the doctor failed."
)


def resume(
    *,
    resume: Annotated[
        str,
        typer.Option(metavar="WORDS", help="Words to append to the command for a resume. May contain {dir} and {n}."),
    ] = "",
    at: Annotated[
        int, typer.Option(min=1, help="The step after which the job saves. Replaces {n} in the command.")
    ] = 4,
    steps: Annotated[int, typer.Option(min=1, help="How many steps after the save are compared.")] = 2,
    twice: Annotated[
        bool, typer.Option("--twice", help="Resume the resumed run, too, from its save after twice as many steps.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Run with torch's deterministic algorithms, which changes the job.")
    ] = False,
    device: Annotated[
        str, declare_choice(("auto", "emulated"), help="auto does not change the job's devices. One of")
    ] = "auto",
    directory: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="DIR",
            help="A new directory for logs, records and the saves ({dir}).  [default: a temporary one]",
        ),
    ] = None,
    hang_after: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long a run may write nothing before it is ended.")
    ] = 600.0,
    longest: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long a run may take before it is ended.")
    ] = 3600.0,
    json_file: Annotated[
        pathlib.Path | None, declare_output_file("--json", help="Write the answer as JSON to this file.")
    ] = None,
    markdown: Annotated[
        pathlib.Path | None, declare_output_file("--markdown", help="Write the answer as Markdown to this file.")
    ] = None,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The job, with {dir} and {n}.")],
) -> None:
    """Run a training job straight through and resumed, and say whether that is the same run.

    The job needs no change. It must save into {dir} after step {n}, and train a few more steps.
    """
    if not any("{dir}" in word for word in command):
        raise UsageError(
            "the command must contain {dir}, the directory into which the job saves, because the command is "
            "run several times"
        )
    if twice and steps >= at:
        raise UsageError(
            "--twice needs fewer --steps than --at, because a job that resumes by itself takes its newest save"
        )
    from fsdp_doctor.resume.answer import render_json, render_markdown, render_text
    from fsdp_doctor.resume.diagnosis import diagnose
    from fsdp_doctor.resume.runs import UserJob

    job = UserJob(
        command=tuple(command),
        resume=tuple(shlex.split(resume)),
        at=at,
        work=_make_directory(directory),
        hang_after=hang_after,
        longest=longest,
        emulated=device == "emulated",
        deterministic=deterministic,
    )
    answer = diagnose(job, steps=steps, twice=twice, start=_start)
    write(None, render_text(answer))
    if json_file is not None:
        write(json_file, render_json(answer))
    if markdown is not None:
        write(markdown, render_markdown(answer))
    raise SystemExit(answer.exit_code)


def _start(job: UserJob, name: RunName, **where: Any) -> UserJobRun:
    from fsdp_doctor.resume.runs import RUNS, run_job

    print(f"fsdp-doctor: {RUNS[name]}", file=sys.stderr, flush=True)
    return run_job(job, name, **where)


def _make_directory(directory: pathlib.Path | None) -> pathlib.Path:
    if directory is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="fsdp-doctor-resume-"))
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"--directory {directory}: the directory exists; name a new one") from None
    except OSError as error:
        raise UsageError(f"--directory {directory}: {error.strerror or error}") from None
    return directory.resolve()
