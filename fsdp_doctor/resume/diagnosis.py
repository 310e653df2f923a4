"""Runs the job straight and resumed, repeats runs if they differ, and makes the answer.

A difference in loaded state at the first step after the save always counts, since the straight run saved this state.
Random draws and computed values differ between any two runs of some programs. A difference in these values counts only
if a second straight run repeats the first. If nothing else differs, a second resumed run must also repeat the first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import msgspec
from typing_extensions import assert_never

from fsdp_doctor.errors import UsageError
from fsdp_doctor.resume.causes import ResumeCause, list_causes
from fsdp_doctor.resume.comparison import (
    COMPUTED,
    NOT_LOADED,
    RankComparison,
    ResumeSymptom,
    RunDifference,
    StateKind,
    find_unrepeatable,
)
from fsdp_doctor.resume.records import RankRecord, StepRecord
from fsdp_doctor.resume.runs import RunName, UserJob, UserJobRun, require_records, run_job

SCHEMA_VERSION = 1

ResumeVerdict: TypeAlias = Literal["same", "wrong", "not repeatable"]
_KINDS: tuple[StateKind, ...] = get_args(StateKind)


class ResumeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between the straight and the resumed run.

    step: the first step at which the runs differ.
    resume: 1 for the first resume, 2 for the second.
    text: a description of the difference, with the ranks and the other state that the value equals, if any.
    causes: the known causes, the most likely first.
    """

    step: int
    resume: int
    kind: StateKind
    symptom: ResumeSymptom
    text: str
    ranks: list[int]
    causes: list[ResumeCause]


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one run.

    recorder_seconds: mean time for recording a step, on the slowest rank.
    """

    name: RunName
    command: list[str]
    seconds: float
    steps: int
    recorder_seconds: float
    log: str


class ResumeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``fsdp-doctor resume``, which is also its JSON.

    findings: the differences that count; fix the first one first.
    notes: sentences on ignored differences, and on state that was not compared.
    """

    verdict: ResumeVerdict
    sentence: str
    at: int
    ranks: int
    findings: list[ResumeFinding]
    notes: list[str]
    runs: list[RunFacts]
    torch: str
    device: str
    frameworks: list[str]
    schema: Literal["fsdp-doctor-resume"] = "fsdp-doctor-resume"
    schema_version: int = SCHEMA_VERSION

    @property
    def exit_code(self) -> int:
        match self.verdict:
            case "same":
                return 0
            case "wrong":
                return 1
            case "not repeatable":
                return 3
            case _ as unreachable:
                assert_never(unreachable)


def diagnose(
    job: UserJob, *, steps: int, twice: bool = False, start: Callable[..., UserJobRun] = run_job
) -> ResumeAnswer:
    """Runs the job straight and resumed, and compares the runs. Raises UsageError if the runs allow no answer.

    steps: the number of steps after the save that are compared.
    twice: whether a save of the resumed run is resumed, too.
    start: the function that runs the job, with the signature of :func:`run_job`.
    """
    diagnosis = _Diagnosis(job, steps, start)
    diagnosis.resume_once(go_on=job.at if twice else 0)
    if twice:
        diagnosis.resume_again()
    return diagnosis.answer()


class _Diagnosis:
    def __init__(self, job: UserJob, steps: int, start: Callable[..., UserJobRun]) -> None:
        self._job, self._steps, self._start = job, steps, start
        self._directory = job.work / "job"
        self._runs: dict[RunName, UserJobRun] = {}
        self._findings: list[ResumeFinding] = []
        self._unrepeatable = ""
        self._notes: list[str] = []

    def _run(self, name: RunName, *, stop: int, directory: pathlib.Path, resume_at: int | None = None) -> UserJobRun:
        run = self._runs[name] = self._start(self._job, name, stop=stop, directory=directory, resume_at=resume_at)
        return run

    def resume_once(self, go_on: int) -> None:
        """Runs the job straight and resumed, and compares the two runs.

        go_on: the number of further steps that the resumed run takes after the compared steps.
        """
        at = self._job.at
        straight = self._run("straight", stop=at + self._steps, directory=self._directory)
        require_records(straight, at + 1)
        self._require_save(straight)
        resumed = self._run("resumed", stop=self._steps + go_on, directory=self._directory, resume_at=at)
        require_records(resumed, 0)
        self._compare(straight, resumed, 1)

    def resume_again(self) -> None:
        at, resumed = self._job.at, self._runs["resumed"]
        require_records(resumed, at + 1)
        second = self._run("second-resume", stop=self._steps, directory=self._directory, resume_at=2 * at)
        require_records(second, 0)
        self._compare(resumed, second, 2)

    def _require_save(self, straight: UserJobRun) -> None:
        """Raises UsageError if the run wrote no file after step ``at``, from which the job is to be resumed."""
        at = self._job.at
        records = [step for record in straight.ranks.values() for step in [*record.steps, record.final] if step]
        written = sorted({record.step - 1 for record in records if record.written})
        if not [step for step in written if step >= at]:
            when = f"only after step {', '.join(map(str, written))}" if written else "never"
            raise UsageError(
                f"the job must save after step {at}, but wrote into {{dir}} {when}: set --at to the step of the "
                "job's save, or use {n} to set the job's save step"
            )

    def _compare(self, one: UserJobRun, other: UserJobRun, resume: int) -> None:
        found = self._find(one, other, resume)
        if not found:
            return
        rank_pairs = self._pair(one, other)
        again = self._run_again()
        kinds = {difference.kind for _, difference in found}
        if self._unrepeatable:
            self._notes.append(
                "random draws and computed values were not compared, because the program does not repeat itself: "
                f"{self._unrepeatable} differ between two runs from the start"
            )
            found = [each for each in found if each[1].kind not in NOT_LOADED]
        else:
            found = self._drop_undrawn(found, again, bool(kinds & {*COMPUTED, "data"}))
            if found and {difference.kind for _, difference in found} <= {"generators", *COMPUTED}:
                # Does the resumed run compute the same when it is run again?
                resume_at = self._job.at * resume
                resumed = self._run("resumed-again", stop=self._steps, directory=self._directory, resume_at=resume_at)
                require_records(resumed, 1)
                self._unrepeatable = _find_unrepeatable(other, resumed)
                found = [] if self._unrepeatable else found
        self._findings += self._merge(_drop_effects(found), resume, len(rank_pairs))

    def _pair(self, one: UserJobRun, other: UserJobRun) -> list[tuple[int, RankRecord, RankRecord]]:
        if other.ranks and {*one.ranks} != {*other.ranks}:
            raise UsageError(
                f"the {other.name} run has {len(other.ranks)} ranks, but the {one.name} run has {len(one.ranks)}"
            )
        return [
            (rank, record, other.ranks.get(rank, RankRecord(facts=record.facts, steps=[])))
            for rank, record in one.ranks.items()
        ]

    def _find(self, one: UserJobRun, other: UserJobRun, resume: int) -> list[tuple[int, RunDifference]]:
        at, straight = self._job.at * resume, self._runs["straight"]
        steps = {rank: _renumber(record, at - self._job.at) for rank, record in one.ranks.items()}
        if resume == 2:
            steps = {rank: straight.ranks[rank].steps[: self._job.at] + after for rank, after in steps.items()}
        found = []
        for rank, _, resumed in self._pair(one, other):
            others = {number: other[at].generators for number, other in steps.items() if number != rank}
            comparison = RankComparison(steps[rank], _renumber(resumed, at), at, others)
            found += [(rank, difference) for difference in comparison.list_differences()]
        return found

    def _run_again(self) -> UserJobRun:
        """Repeats the straight run, unless it was repeated already, and notes whether the two runs differ."""
        if "straight-again" not in self._runs:
            straight = self._runs["straight"]
            stop = self._job.at + self._steps
            again = self._run("straight-again", stop=stop, directory=self._job.work / "job-again")
            require_records(again, self._job.at + 1)
            self._unrepeatable = _find_unrepeatable(straight, again)
        return self._runs["straight-again"]

    def _drop_undrawn(
        self, found: Sequence[tuple[int, RunDifference]], again: UserJobRun, computed: bool
    ) -> list[tuple[int, RunDifference]]:
        """Drops the differences of generators that also differ between two straight runs, and adds notes on them.

        computed: whether batches or computed values of the resumed run differ; if not, all generators are dropped.
        """
        at = self._job.at
        straight = self._runs["straight"]
        kept = []
        for rank, difference in found:
            if difference.kind == "generators":
                states = [run.ranks[rank].steps[at].generators.get(difference.names[0]) for run in (straight, again)]
                if states[0] != states[1] or not computed:
                    self._notes.append(f"{difference.text} on rank {rank}, and nothing that is compared depends on it")
                    continue
            kept.append((rank, difference))
        return kept

    def _merge(self, found: Sequence[tuple[int, RunDifference]], resume: int, num_ranks: int) -> list[ResumeFinding]:
        """Merges the differences of all ranks into one finding for each symptom, in the order of ``StateKind``."""
        by_symptom: dict[tuple[StateKind, ResumeSymptom], dict[int, list[str]]] = {}
        for rank, difference in found:
            of_rank = by_symptom.setdefault((difference.kind, difference.symptom), {})
            of_rank.setdefault(rank, []).append(difference.text)
        frameworks = self._first_record.facts.frameworks
        merged = [
            ResumeFinding(
                step=self._job.at * resume + 1,
                resume=resume,
                kind=kind,
                symptom=symptom,
                text=_join_ranks({rank: "; ".join(texts) for rank, texts in ranks.items()}, num_ranks),
                ranks=sorted(ranks),
                causes=list_causes(symptom, some_ranks=len(ranks) < num_ranks, resume=resume, frameworks=frameworks),
            )
            for (kind, symptom), ranks in by_symptom.items()
        ]
        return sorted(merged, key=lambda finding: _KINDS.index(finding.kind))

    @property
    def _first_record(self) -> RankRecord:
        return next(iter(self._runs["straight"].ranks.values()))

    def answer(self) -> ResumeAnswer:
        record = self._first_record
        at, num_ranks = self._job.at, len(self._runs["straight"].ranks)
        verdict: ResumeVerdict = "wrong" if self._findings else "not repeatable" if self._unrepeatable else "same"
        return ResumeAnswer(
            verdict=verdict,
            sentence=self._make_sentence(verdict, num_ranks),
            at=at,
            ranks=num_ranks,
            findings=self._findings,
            notes=[*dict.fromkeys(self._notes), *self._list_unseen(record)],
            runs=[_read_facts(run) for run in self._runs.values()],
            torch=record.facts.torch,
            device=record.facts.device,
            frameworks=record.facts.frameworks,
        )

    def _make_sentence(self, verdict: ResumeVerdict, num_ranks: int) -> str:
        at = self._job.at
        match verdict:
            case "same":
                compared = min(run.num_steps for run in self._runs.values() if run.name == "resumed")
                last = at + min(compared, self._steps)
                twice = (
                    f", and from step {2 * at + 1} on after a second resume" if "second-resume" in self._runs else ""
                )
                steps = f"step {at + 1} is" if last == at + 1 else f"steps {at + 1} to {last} are"
                ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
                return f"The resumed run is the same run: {steps} equal bit by bit on {ranks}{twice}."
            case "wrong":
                first = self._findings[0]
                second = " the second time" if first.resume == 2 else ""
                return f"The resumed run{second} differs from the straight run from step {first.step} on: {first.text}."
            case "not repeatable":
                return (
                    f"The program is not repeatable: {self._unrepeatable} differ between two runs of the same "
                    "command. For the resume only the loaded state was compared, and it is right."
                )
            case _ as unreachable:
                assert_never(unreachable)

    def _list_unseen(self, record: RankRecord) -> Iterator[str]:
        """Lists notes on state that was not compared, and on settings that limit the answer."""
        steps = record.steps
        batches = [batch for step in steps for batch in step.batches]
        if not batches:
            yield "the batches were not seen: the model is not called as a module"
        elif not any(batches):
            yield "the batches were not compared: they have no tensors"
        epochs = steps[-1].epochs
        before = sum(len(step.batches) for step in steps[: self._job.at])
        if epochs and all(before % length for length in epochs):
            per_step = max(before // self._job.at, 1)
            yield (
                f"step {self._job.at} is within an epoch of {epochs[0]} batches; --at "
                f"{max(epochs[0] // per_step, 1)} is the end of an epoch, where other resume errors appear"
            )
        for name in record.facts.unseen:
            yield f"{name} is loaded: its state outside torch.optim's optimizers was not compared"
        if record.facts.device == "emulated":
            yield (
                "on the emulated device fsdp-doctor saves and restores the device's generators together with the CPU's"
            )
        if self._job.deterministic:
            yield "the job ran with deterministic algorithms, which fsdp-doctor turned on"


def _renumber(record: RankRecord, begin: int) -> list[StepRecord]:
    """Returns a process's steps and its final record, with ``begin`` added to each step number."""
    steps = [*record.steps, *([record.final] if record.final is not None else [])]
    return [msgspec.structs.replace(step, step=step.step + begin) for step in steps]


def _find_unrepeatable(one: UserJobRun, other: UserJobRun) -> str:
    differing = [
        find_unrepeatable(record.steps, other.ranks[rank].steps)
        for rank, record in one.ranks.items()
        if rank in other.ranks
    ]
    return next(filter(None, differing), "")


def _drop_effects(found: Sequence[tuple[int, RunDifference]]) -> list[tuple[int, RunDifference]]:
    """Drops differences that are effects of another difference on any rank."""
    kinds = {difference.kind for _, difference in found}
    effects: set[StateKind] = set()
    if kinds - {*COMPUTED}:
        effects |= {*COMPUTED}
    if "run" in kinds:
        effects |= {*_KINDS} - {"run"}
    whole = {each.symptom for _, each in found} & {"weights-of-another-step", "weights-not-loaded"}
    if whole and {each.symptom for _, each in found if each.kind == "optimizer"} <= {"state-of-another-step"}:
        effects |= {"optimizer"}
    return [(rank, difference) for rank, difference in found if difference.kind not in effects]


def _join_ranks(texts: dict[int, str], num_ranks: int) -> str:
    """Joins the texts of the ranks; a text that not all ranks have is followed by the numbers of its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and len(texts) == num_ranks:
        return next(iter(ranks_of))
    parts = []
    for text, ranks in ranks_of.items():
        numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        parts.append(f"{text} on rank{'s' * (len(ranks) > 1)} {numbers}")
    more = f"; and {len(parts) - 3} more differences" if len(parts) > 3 else ""
    return "; ".join(parts[:3]) + more


def _read_facts(run: UserJobRun) -> RunFacts:
    seconds = [record.steps[-1].seconds / len(record.steps) for record in run.ranks.values() if record.steps]
    return RunFacts(
        name=run.name,
        command=list(run.command),
        seconds=round(run.ended.seconds, 1),
        steps=run.num_steps,
        recorder_seconds=max(seconds, default=0.0),
        log=str(run.log),
    )
