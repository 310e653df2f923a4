"""Runs the user's job with the recorder, ends it, and reads its records."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.bundle.command_run import CommandRun, end_descendants, run
from fsdp_doctor.errors import Interrupted, UsageError
from fsdp_doctor.machine.injection import make_variables
from fsdp_doctor.resume.records import RankRecord, read_ranks, read_start_failures

RunName: TypeAlias = Literal["straight", "resumed", "straight-again", "resumed-again", "second-resume"]
# By name, what each run is for.
RUNS: dict[RunName, str] = {
    "straight": "straight through the save",
    "resumed": "resumed from the save",
    "straight-again": "straight again, because something differs: does the program repeat itself?",
    "resumed-again": "resumed again, because only gradients differ: does the resumed run repeat itself?",
    "second-resume": "resumed from the save of the resumed run",
}
_RECORDER = pathlib.Path(__file__).with_name("recorder.py")
_UNSEEN = (
    "the recorder saw no step of a torch.optim optimizer. PYTHONPATH must reach the ranks (it does not with python -I, "
    "srun --export=NONE, or Ray and containers that drop it)"
)


@dataclass(frozen=True, kw_only=True)
class UserJob:
    """A user's job and the settings for running it.

    command: the words of the command, with the placeholders ``{dir}`` and ``{n}``.
    resume: the words that are added to the command for a resumed run.
    at: the step after which the job saves.
    work: a directory for the logs, the records and the job's own directories.
    hang_after: seconds without output after which a run is ended.
    longest: seconds after which any run is ended.
    """

    command: tuple[str, ...]
    resume: tuple[str, ...]
    at: int
    work: pathlib.Path
    hang_after: float
    longest: float
    emulated: bool = False
    deterministic: bool = False

    def fill(self, words: Sequence[str], directory: pathlib.Path, step: int) -> list[str]:
        return [word.replace("{dir}", str(directory)).replace("{n}", str(step)) for word in words]

    def make_options(self, record: pathlib.Path, stop: int, directory: pathlib.Path) -> str:
        """Makes the JSON that ``recorder.start`` reads from the environment of the job's processes."""
        options = {"record": str(record), "stop": stop, "job": str(directory)}
        return json.dumps({**options, "emulated": self.emulated, "deterministic": self.deterministic})


@dataclass(frozen=True, kw_only=True)
class UserJobRun:
    """One run of the job.

    ranks: the record of each rank.
    """

    name: RunName
    command: tuple[str, ...]
    ended: CommandRun
    log: pathlib.Path
    ranks: dict[int, RankRecord]

    @property
    def num_steps(self) -> int:
        """Number of steps that every rank took."""
        return min((len(record.steps) for record in self.ranks.values()), default=0)

    @property
    def failed(self) -> bool:
        """Returns whether the run ended with a nonzero exit code before the step at which it was to be ended."""
        reached = bool(self.ranks) and all(record.final is not None for record in self.ranks.values())
        return not reached and self.ended.exit_code != 0


def run_job(
    job: UserJob, name: RunName, *, stop: int, directory: pathlib.Path, resume_at: int | None = None
) -> UserJobRun:
    """Runs the job until every rank has taken ``stop`` steps.

    Raises UsageError if the command or the recorder cannot be started, and Interrupted if the user stops the run.

    directory: the value of ``{dir}``; created if missing.
    resume_at: the step from whose save the job resumes; None for a straight run.
    """
    place = job.work / name
    record = place / "records"
    record.mkdir(parents=True)
    directory.mkdir(exist_ok=True)
    words = job.fill(job.command, directory, job.at)
    if resume_at is not None:
        words += job.fill(job.resume, directory, resume_at)
    log = place / "output.log"
    variables = {
        "FSDP_DOCTOR_RESUME": job.make_options(record, stop, directory),
        **make_variables({"torch": _RECORDER}),
        # A run for comparison is no run to publish.
        "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
    }
    if job.deterministic:
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
    ended = run(
        words,
        output=log,
        dumps=place / "dumps",
        hang_after=job.hang_after,
        longest=job.longest,
        variables=variables,
    )
    end_descendants()
    if ended.end == "stopped":
        raise Interrupted(f"stopped; the output of the job is in {log}")
    if failures := read_start_failures(record):
        raise UsageError(f"the recorder could not start in the job: {failures[0]}")
    return UserJobRun(name=name, command=tuple(words), ended=ended, log=log, ranks=read_ranks(record))


def require_records(run: UserJobRun, num_steps: int) -> None:
    """Raises UsageError for a run that failed, has no records, or took fewer than ``num_steps`` steps.

    num_steps: the number of steps that every rank must have taken; 0 also allows a run without any step.
    """
    see = f"see {run.log}, or `fsdp-doctor explain {shlex.quote(str(run.log))}`"
    of = f"the {run.name} run"
    errors = {rank: record.error for rank, record in run.ranks.items() if record.error}
    for rank, error in errors.items():
        raise UsageError(f"{of}: the recorder stopped on rank {rank}: {error}; {see}")
    if run.failed:
        what = f"{run.ended.sentence} {_read_end(run.log)}".rstrip(" .")
        raise UsageError(f"{of} failed. {what}; {see}")
    stepped = any(record.steps for record in run.ranks.values())
    if not stepped and not num_steps:
        return
    if not stepped:
        unseen = sorted({name for record in run.ranks.values() for name in record.facts.unseen})
        forwards = max((record.forwards for record in run.ranks.values()), default=0)
        seen = f"; the model was called {forwards} times, so something else updates its weights" if forwards else ""
        loaded = f"; {', '.join(unseen)} is loaded, and the recorder does not see steps inside it" if unseen else ""
        raise UsageError(f"{of}: {_UNSEEN}{seen}{loaded}; {see}")
    missing = next(iter(run.ranks.values())).facts.ranks - len(run.ranks)
    if missing:
        raise UsageError(f"{of}: {missing} ranks left no record; all ranks must run on this machine; {see}")
    if run.num_steps < num_steps:
        raise UsageError(
            f"{of} took {run.num_steps} steps, but {num_steps} steps are needed: let the job train longer; {see}"
        )


def _read_end(log: pathlib.Path) -> str:
    """Returns a sentence with the last line at the end of the log that names an error; empty if there is none."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line and not line.startswith(("torch.distributed", "raise "))]
    return f"It says: {errors[-1]}" if errors else ""
