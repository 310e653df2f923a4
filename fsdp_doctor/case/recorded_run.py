"""A case on one rank as its record: each stage is reported, exceptions are part of it, the ranks agree on the end."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.case.leftovers import torch_functions
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Unsupported
from fsdp_doctor.extract.agreement import num_agreements
from fsdp_doctor.verdict.classification import OWN_STAGES
from fsdp_doctor.verdict.records import Problem, Record, Stage
from fsdp_doctor.verdict.tracebacks import failure_from

RecordSink = Callable[[Record], None]
_PROGRESS_SECONDS = 1.0


class RecordedRun:
    """The state of one case while it runs: the record so far, reported at each stage.

    report: called with the record each time the case reaches another stage.
    """

    _runtime: Runtime

    def __init__(self, case_id: str, report: RecordSink) -> None:
        self._tell = report
        self._torch_functions = torch_functions()
        self._reported_at = 0.0
        self._changed_somewhere = False
        self._in_step = True
        self._sound_everywhere = False
        self.record = Record(case_id=case_id, stage="build")

    @property
    def _unbroken(self) -> bool:
        return self.record.failure is None and not self.record.unsupported

    def _agree(self) -> bool:
        """Tells the other ranks whether this one failed. False if they ended otherwise.

        Where all ranks ended alike, one collective over the model's own group shows whether it
        still works; the answer decides whether the next case may run in the same workers.
        """
        self._torch_functions.restore()
        failed = self.record.failure is not None
        stage = self.record.stage
        if not failed:
            self._enter("agree")
        try:
            same = self._same_everywhere(failed)
            # A collective of the next step is what the path left it.
            self._torch_functions.reapply()
            works = same and self._runtime.group_works()
            self._add(healthy=self.record.healthy and works and self._in_step, stage=stage)
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
        sound = not self.record.retire and all(problem.kind == "leak" for problem in self.record.problems)
        # The path may have left another default device.
        mine = torch.tensor([int(failed), int(changed), num_agreements(), int(sound)], device="cpu")
        everyone = [torch.zeros_like(mine) for _ in range(self._runtime.world_size)]
        dist.all_gather(everyone, mine, group=self._runtime.control)
        # All ranks build the scenario anew, or none does; and all of them call the path again, or none does.
        self._changed_somewhere = any(bool(other[1]) for other in everyone)
        # A path may have loaded on one rank alone, and what it was told would be the next path's answer.
        self._in_step = all(int(other[2]) == int(mine[2]) for other in everyone)
        self._sound_everywhere = all(bool(other[3]) for other in everyone)
        return all(int(other[0]) == int(failed) for other in everyone)

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
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
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
        """What the doctor itself does uses torch's own functions, and all else what a path put in their place."""
        functions = self._torch_functions
        (functions.restore if stage in OWN_STAGES or stage == "agree" else functions.reapply)()
        self.record = dataclasses.replace(self.record, stage=stage)

    def _add(self, *, problems: tuple[Problem, ...] = (), **fields: Any) -> None:
        told = (Problem(kind=one.kind, detail=self.record.call_in_words + one.detail) for one in problems)
        self.record = dataclasses.replace(self.record, problems=(*self.record.problems, *told), **fields)
