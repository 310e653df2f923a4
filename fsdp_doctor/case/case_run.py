"""What every case is, whatever its path does: build, exercise the path, agree, train on; each stage is reported."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.paths import Path, impossible
from fsdp_doctor.verdict.records import Problem, Record, Stage
from fsdp_doctor.verdict.tracebacks import failure_from

RecordSink = Callable[[Record], None]
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A case, its path and the function behind it, and what the rank has to run it with.

    report: called with the record each time the case reaches another stage.
    """

    case: Case
    path: Path
    function: PathFunction
    runtime: Runtime
    leftovers: Leftovers
    report: RecordSink


class CaseRun(abc.ABC):
    """The state of one case while it runs: the record so far, reported at each stage.

    given: what the path is called with, once the case is prepared. undoes_staging: as that of the path.
    """

    given: PathArguments

    def __init__(self, assignment: Assignment) -> None:
        self._case = assignment.case
        self._path = assignment.path
        self._contract = assignment.path.contract
        self.undoes_staging = assignment.path.undoes_staging
        self._function = assignment.function
        self._runtime = assignment.runtime
        self._leftovers = assignment.leftovers
        self._tell = assignment.report
        self._reported_at = 0.0
        self._changed_somewhere = False
        self.record = Record(case_id=self._case.id, stage="build")

    @abc.abstractmethod
    def _new_trainer(self) -> Trainer:
        """The scenario's trainer, sharded, and trained where its phase says so."""

    @abc.abstractmethod
    def _bring_to_state(self, trainer: Trainer) -> None:
        """Brings the scenario to the state in which the path runs."""

    @abc.abstractmethod
    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        """Runs the path by ``call`` and verifies what it did; see :meth:`exercise`."""

    @abc.abstractmethod
    def _train_on(self, trainer: Trainer) -> None:
        """Has the trainer train the step that follows, and looks at what it starts from."""

    @abc.abstractmethod
    def _is_reusable(self, trainer: Trainer) -> bool:
        """Whether the trainer is again what :meth:`_new_trainer` gave; asked when nothing went wrong."""

    def run(self, kept: Trainer | None) -> Trainer | None:
        """The whole case. Returns the trainer, in the state between two steps, if it may be used again."""
        trainer = self.prepare(kept)
        if trainer is not None:
            self._leftovers.look_before()
            self.exercise(trainer, lambda: self._function(self.given), owned=True)
        reusable = self.go_on(trainer)
        self._add(retire=self._leftovers.undo(), done=True)
        self._report(self.record)
        return reusable

    def prepare(self, kept: Trainer | None) -> Trainer | None:
        """The scenario's trainer in the state in which the path runs; None where the record says why there is none."""
        with self._catching():
            trainer = kept or self._build()
            self._bring_to_state(trainer)
            self.given = self._arguments(trainer)
            return trainer
        return None

    def exercise(self, trainer: Trainer, call: Callable[[], Any], *, owned: bool) -> None:
        """Has ``call`` run the path, and verifies what it did.

        owned: whether the path runs in ``call`` alone and nobody else holds its result, so that its memory can be told.
        """
        with self._catching():
            self._verify(trainer, call, owned)

    def go_on(self, trainer: Trainer | None) -> Trainer | None:
        """Agrees with the other ranks and trains on. Returns the trainer if it may be used again."""
        goes_on = not self.record.unsupported and self._agree() and self._unbroken and not self.record.refusal
        if goes_on and trainer:
            with self._catching():
                self._train_on(trainer)
            self._agree()
        reusable = self._unbroken and not self._changed_somewhere and trainer is not None and self._is_reusable(trainer)
        return trainer if reusable else None

    @property
    def direction(self) -> Direction:
        """Of the path."""
        return self._path.direction

    @property
    def _unbroken(self) -> bool:
        return self.record.failure is None and not self.record.unsupported

    def _build(self) -> Trainer:
        self._enter("build")
        reason = _why_not(self._case, self._path, self._runtime)
        if reason:
            raise Unsupported(reason)
        return self._new_trainer()

    def _arguments(self, trainer: Trainer) -> PathArguments:
        return PathArguments(
            model=trainer.model,
            device=self._runtime.device,
            optimizer=trainer.optimizer,
            scratch=self._scratch,
            control=self._runtime.control,
        )

    @property
    def _scratch(self) -> pathlib.Path:
        """A directory of this case's own, not yet made."""
        return self._runtime.scratch / self._case.id.replace("/", "-")

    @property
    def _watches_state(self) -> bool:
        """Reading the model would wait for copies in flight, and so hide the race that a non-blocking
        scenario is there to show: nothing of ours looks at it there until the path is through."""
        return self._case.scenario.transfer == "blocking"

    def _agree(self) -> bool:
        """Tells the other ranks whether this one failed. False if they ended otherwise.

        Where all ranks ended alike, one collective over the model's own group shows whether it
        still works; the answer decides whether the next case may run in the same workers.
        """
        failed = self.record.failure is not None
        stage = self.record.stage
        if not failed:
            self._enter("agree")
        try:
            same = self._same_everywhere(failed)
            works = same and self._group_works()
            self._add(healthy=self.record.healthy and works, stage=stage)
        except Exception as error:
            if not failed:
                self._add(failure=failure_from(error))
            self._add(healthy=False)
            return False
        if same and not works:
            self._add(
                problems=(Problem(kind="poisoned", detail="a collective over the model's group gives a wrong sum"),)
            )
        return works

    def _same_everywhere(self, failed: bool) -> bool:
        changed = any(problem.kind == "poisoned" for problem in self.record.problems)
        # The path may have left another default device.
        mine = torch.tensor([int(failed), int(changed)], device="cpu")
        everyone = [torch.zeros_like(mine) for _ in range(self._runtime.world_size)]
        dist.all_gather(everyone, mine, group=self._runtime.control)
        # All ranks build the scenario anew, or none does.
        self._changed_somewhere = any(bool(other[1]) for other in everyone)
        return all(int(other[0]) == int(failed) for other in everyone)

    def _group_works(self) -> bool:
        ones = torch.ones(4, device=self._runtime.device)
        dist.all_reduce(ones)
        self._runtime.synchronize()
        return bool((ones == self._runtime.world_size).all())

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """The path's exceptions become part of the record, KeyboardInterrupt and a user's own kind among them:
        nobody interrupts a worker. SystemExit is left alone: it ends the worker."""
        try:
            yield
        except Unsupported as reason:
            self._add(unsupported=str(reason))
        except SystemExit:
            raise
        except BaseException as error:
            self._add(failure=failure_from(error))
            self._report(self.record)

    def _enter(self, stage: Stage) -> None:
        self._stay(stage)
        self._report(self.record)

    def _report(self, record: Record) -> None:
        self._reported_at = time.monotonic()
        self._tell(record)

    def _show_progress(self, num_tensors: int) -> None:
        """A path that goes on yielding is no hang, however long it takes."""
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            self._add(num_tensors=num_tensors)
            self._report(self.record)

    def _stay(self, stage: Stage) -> None:
        self.record = dataclasses.replace(self.record, stage=stage)

    def _add(self, *, problems: tuple[Problem, ...] = (), **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, problems=(*self.record.problems, *problems), **fields)


def _why_not(case: Case, path: Path, runtime: Runtime) -> str:
    """Why the path cannot be tried in this scenario; empty if it can."""
    if reason := impossible(path, case.scenario):
        return reason
    on_disk = path.name == "dcp" or path.contract.given in ("dcp", "rank_files")
    if on_disk and runtime.num_nodes > 1:
        return "the checkpoint directory is not shared between the nodes"
    return ""
