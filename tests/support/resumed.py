"""Runs the programs in ``resume/`` as ``diagnose`` does, but on forked ranks, so that no interpreter has to start."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import runpy
import sys

from fsdp_doctor.bundle.command_run import CommandRun
from fsdp_doctor.resume.diagnosis import ResumeAnswer, diagnose
from fsdp_doctor.resume.records import read_ranks
from fsdp_doctor.resume.runs import RunName, UserJob, UserJobRun
from support.forked import job as forked_job
from support.places import TESTS

_SECONDS = 240


def judge(
    *command: str,
    work: pathlib.Path,
    resume: tuple[str, ...],
    ranks: int = 1,
    at: int = 4,
    twice: bool = False,
    emulated: bool = False,
    deterministic: bool = False,
) -> ResumeAnswer:
    """Returns the answer for a program in ``tests/resume``. command: the file of the program, and its arguments."""
    job = UserJob(
        command=command,
        resume=resume,
        at=at,
        work=work,
        hang_after=_SECONDS,
        longest=_SECONDS,
        emulated=emulated,
        deterministic=deterministic,
    )
    return diagnose(job, steps=2, twice=twice, start=functools.partial(_run_forked, ranks=ranks))


def _run_forked(
    job: UserJob, name: RunName, *, stop: int, directory: pathlib.Path, resume_at: int | None = None, ranks: int
) -> UserJobRun:
    record = job.work / name / "records"
    record.mkdir(parents=True)
    directory.mkdir(exist_ok=True)
    words = job.fill(job.command, directory, job.at)
    if resume_at is not None:
        words += job.fill(job.resume, directory, resume_at)
    options = job.make_options(record, stop, directory)
    with forked_job(_run_rank, [(words, options)] * ranks) as started:
        for process in started.ranks:
            process.join(_SECONDS)
        codes, printed = [process.exitcode for process in started.ranks], started.printed()
    assert codes == [0] * ranks, printed
    log = job.work / name / "output.log"
    log.write_text(printed)
    ended = CommandRun(command=tuple(words), end="exited", exit_code=0, seconds=0, silent=0, output=log)
    return UserJobRun(name=name, command=tuple(words), ended=ended, log=log, ranks=read_ranks(record))


def _run_rank(words: list[str], options: str) -> None:
    from fsdp_doctor.resume import recorder

    # The objects of the fork server do not belong to the program, and would slow garbage collection down.
    gc.freeze()
    os.environ["FSDP_DOCTOR_RESUME"] = options
    recorder.start("torch")
    sys.argv = words
    runpy.run_path(str(TESTS / "resume" / words[0]), run_name="__main__")
