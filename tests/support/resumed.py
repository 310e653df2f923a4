"""Runs of ``resume/programs.py`` as ``diagnose`` starts them, but on forked ranks, for which no interpreter starts."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

from fsdp_doctor.bundle.command_run import CommandRun
from fsdp_doctor.resume.diagnosis import ResumeAnswer, diagnose
from fsdp_doctor.resume.records import read_ranks
from fsdp_doctor.resume.runs import RunName, UserJob, UserJobRun
from support.forked import job as forked_job
from support.places import TESTS

_PROGRAMS = TESTS / "resume" / "programs.py"
_SECONDS = 240


def judge(name: str, work: pathlib.Path, **options: Any) -> ResumeAnswer:
    """The answer for a program of ``programs.py``, run on its ranks."""
    program = getattr(load_programs(), name)
    job = UserJob(
        command=(name, "--dir", "{dir}"),
        resume=("--resume",),
        at=program.at,
        work=work,
        hang_after=_SECONDS,
        longest=_SECONDS,
    )

    start = functools.partial(_run_forked, ranks=program.ranks)
    return diagnose(job, steps=2, twice=program.twice, start=start, **options)


def load_programs() -> Any:
    spec = importlib.util.spec_from_file_location("resume_programs", _PROGRAMS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["resume_programs"] = module
    spec.loader.exec_module(module)
    return module


def _run_forked(
    job: UserJob,
    name: RunName,
    *,
    stop: int,
    directory: pathlib.Path,
    resume_at: int | None = None,
    ranks: int,
) -> UserJobRun:
    record = job.work / name / "records"
    record.mkdir(parents=True)
    directory.mkdir(exist_ok=True)
    words = job.fill(job.command, directory, job.at)
    if resume_at is not None:
        words += job.fill(job.resume, directory, resume_at)
    options = {"record": str(record), "stop": stop, "job": str(directory), "emulated": False, "deterministic": False}
    with forked_job(_run_rank, [(words, json.dumps(options))] * ranks) as started:
        for process in started.ranks:
            process.join(_SECONDS)
        codes, printed = [process.exitcode for process in started.ranks], started.printed()
    log = job.work / name / "output.log"
    log.write_text(printed)
    ended = CommandRun(
        command=tuple(words), end="exited", exit_code=max(code or 0 for code in codes), seconds=0, silent=0, output=log
    )
    assert not any(codes), printed
    return UserJobRun(name=name, command=tuple(words), ended=ended, log=log, ranks=read_ranks(record))


def _run_rank(words: list[str], options: str) -> None:
    from fsdp_doctor.resume import recorder

    os.environ["FSDP_DOCTOR_RESUME"] = options
    recorder.start()
    load_programs().main(words)
