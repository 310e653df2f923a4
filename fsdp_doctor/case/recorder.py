"""Record of one case on one rank, including exceptions. It is reported at each stage, and the ranks agree on the end of
the case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.side_effects import SideEffects, read_torch_functions
from fsdp_doctor.case.trainer import Unsupported
from fsdp_doctor.examination.memory_records import JobStage
from fsdp_doctor.examination.stage_watch import Unwatched
from fsdp_doctor.verdict.classification import OWN_STAGES
from fsdp_doctor.verdict.records import Problem, ProblemKind, Record, Stage, make_failure
from fsdp_doctor.weights.transport.agreement import count_agreements

RecordSink = Callable[[Record], None]
_PROGRESS_SECONDS = 1.0


class _RankState(NamedTuple):
    """State that a rank reports to the other ranks after a call of the method.

    num_agreements: the number of agreements between ranks that fsdp-doctor's own loaders and extractors have made.
    """

    failed: int
    poisoned: int
    num_agreements: int
    sound: int


@dataclass(frozen=True, kw_only=True)
class SharedOutcome:
    """Outcome of a call of the method, over all ranks.

    works: whether all ranks ended in the same way, and a collective over the model's process group works.
    poisoned: whether the training state of some rank was changed.
    sound: whether no rank found anything worse than a leak.
    """

    works: bool = False
    poisoned: bool = False
    sound: bool = False


class Recorder:
    """Keeps the record of one case, and calls ``report`` with it each time the case reaches another stage."""

    def __init__(self, case_id: str, report: RecordSink) -> None:
        self._report = report
        self._torch_functions = read_torch_functions()
        self._reported_at = 0.0
        self.record = Record(case_id=case_id, stage="build")

    @property
    def unbroken(self) -> bool:
        """True if the case has raised no exception and can be run here."""
        return self.record.failure is None and not self.record.unsupported

    def enter(self, stage: Stage) -> None:
        """Begins a stage and reports it."""
        self.switch(stage)
        self.report()

    def switch(self, stage: Stage) -> None:
        """Begins a stage without reporting it.

        In the doctor's own stages torch's functions are the originals. In other stages they are the method's
        replacements, if the method replaced any.
        """
        if stage in OWN_STAGES or stage == "agree":
            self._torch_functions.restore()
        else:
            self._torch_functions.reapply()
        self.record = dataclasses.replace(self.record, stage=stage)

    def report(self) -> None:
        self._reported_at = time.monotonic()
        self._report(self.record)

    def show_progress(self, num_tensors: int) -> None:
        """Reports the number of tensors that the method has yielded, at most once a second.

        A method that keeps yielding is then not taken for a hang.
        """
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            self.add(num_tensors=num_tensors)
            self.report()

    def add(self, *, problems: tuple[Problem, ...] = (), **fields: Any) -> None:
        """Changes fields of the record; problems are appended."""
        new = [dataclasses.replace(p, detail=self.record.call_in_words + p.detail) for p in problems]
        self.record = dataclasses.replace(self.record, problems=(*self.record.problems, *new), **fields)

    def note(self, kind: ProblemKind, detail: str) -> None:
        self.add(problems=(Problem(kind=kind, detail=detail),))

    def fail(self, error: BaseException) -> None:
        self.add(failure=make_failure(error))
        self.report()

    @contextlib.contextmanager
    def record_exceptions(self) -> Iterator[None]:
        """Records an exception instead of raising it, even a KeyboardInterrupt, since no user interrupts a worker.

        SystemExit is raised, because it ends the worker.
        """
        try:
            yield
        except Unsupported as reason:
            self.add(unsupported=str(reason))
        except SystemExit:
            raise
        except BaseException as error:
            self.fail(error)

    @contextlib.contextmanager
    def measure_memory(self, watch: Unwatched, stage: JobStage, method: str = "") -> Iterator[None]:
        """Adds the memory of the block, as ``watch`` measures it, to the record."""
        with watch.measure_stage(stage, method):
            yield
        self.add(ledgers=(*self.record.ledgers, *watch.take()))

    def restore_torch(self) -> None:
        """Restores the torch functions that the method replaced, until the next stage begins."""
        self._torch_functions.restore()

    def clean_up(self, side_effects: SideEffects) -> None:
        """Undoes the method's side effects on the process; the process is retired if one cannot be undone."""
        self._torch_functions.reapply()
        left = side_effects.undo()
        self.add(retire=", ".join(filter(None, (self.record.retire, left))))

    def agree(self, runtime: Runtime) -> SharedOutcome:
        """Tells the other ranks how this rank ended, and tries the model's process group. Every rank must call it.

        The next case may run in the same workers only if the group works.
        """
        self.restore_torch()
        failed = self.record.failure is not None
        stage = self.record.stage
        if not failed:
            self.enter("agree")
        try:
            mine = self._read_rank_state()
            ranks = _exchange_states(mine, runtime)
            alike = all(rank.failed == mine.failed for rank in ranks)
            # A collective of the next step uses what the method left in place of torch's functions.
            self._torch_functions.reapply()
            works = alike and runtime.check_group()
            # A method may have loaded on only one rank; our next agreement would then be another on each rank.
            in_step = all(rank.num_agreements == mine.num_agreements for rank in ranks)
            self.add(healthy=self.record.healthy and works and in_step, stage=stage)
        except Exception as error:
            if not failed:
                self.add(failure=make_failure(error))
            self.add(healthy=False)
            return SharedOutcome()
        if alike and not works:
            self.note("poisoned", "a collective over the model's group gives a wrong sum")
        return SharedOutcome(
            works=works, poisoned=any(rank.poisoned for rank in ranks), sound=all(rank.sound for rank in ranks)
        )

    def _read_rank_state(self) -> _RankState:
        kinds = {problem.kind for problem in self.record.problems}
        return _RankState(
            failed=int(self.record.failure is not None),
            poisoned=int("poisoned" in kinds),
            num_agreements=count_agreements(),
            sound=int(not self.record.retire and kinds <= {"leak"}),
        )


def _exchange_states(mine: _RankState, runtime: Runtime) -> list[_RankState]:
    # The method may have left another default device.
    sent = torch.tensor(mine, device="cpu")
    received = [torch.zeros_like(sent) for _ in range(runtime.world_size)]
    dist.all_gather(received, sent, group=runtime.control)
    return [_RankState(*tensor.tolist()) for tensor in received]
