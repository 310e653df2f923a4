"""The processes that save the checkpoints which other processes load.

Each checkpoint is saved by workers that are started only for this save.

Rank 0's supervisor supervises all these workers, so that their number may differ from the run's number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence

from fsdp_doctor.case.checkpoints import name_directory
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.machine.signals import Interruption
from fsdp_doctor.matrix.axes import CheckpointFit
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.methods import explain_impossible, find_method
from fsdp_doctor.probe import worker
from fsdp_doctor.probe.deadlines import Limits
from fsdp_doctor.probe.job import Job
from fsdp_doctor.probe.messages import StartWorker
from fsdp_doctor.probe.workers import WorkerGroup
from fsdp_doctor.report.document import CaseResult, make_case_fields, make_result
from fsdp_doctor.text import format_count
from fsdp_doctor.verdict.classification import Verdict, classify
from fsdp_doctor.verdict.records import RankReport


def choose_num_writers(asked: int | None, world_size: int, device_type: str) -> int:
    """Chooses the number of ranks that save the checkpoint which ``world_size`` ranks load.

    Returns ``asked`` if it is given, else ``world_size + 1``, or ``world_size - 1`` if there are too few devices.
    Raises UsageError if ``asked`` equals ``world_size``.
    """
    if asked == world_size:
        raise UsageError(
            f"--saved-by {asked} is this run's own number of ranks; use --checkpoint other-run for it, or give "
            "another number"
        )
    more = devices.count(device_type) > world_size
    return asked or (world_size + 1 if more else world_size - 1)


class CheckpointWriters:
    """Saves each checkpoint once, before the first case that loads it.

    place: the place of rank 0.
    saved_by: the number of ranks that save a checkpoint for a load on another number of ranks.
    """

    def __init__(self, place: Place, job: Job, limits: Limits, interruption: Interruption, *, saved_by: int) -> None:
        self._place = place
        self._job = job
        self._limits = limits
        self._interruption = interruption
        self._saved_by = saved_by
        self._results: dict[pathlib.Path, CaseResult | None] = {}

    def write_for(self, number: int) -> CaseResult | None:
        """Saves the checkpoint that a case loads, unless it is already saved.

        Returns the case's result if the save failed, else None.

        Raises Interrupted if a signal arrives during the save.
        """
        case = self._job.cases[number]
        # The checkpoint of a framework's case is saved by a generation of the conductor's workers.
        if isinstance(case, FrameworkCase) or not case.scenario.checkpoint.saved_elsewhere or self._place.num_nodes > 1:
            return None
        if explain_impossible(find_method(case.method, case.scenario.version), case.scenario):
            return None
        key = name_directory(case.scenario, self._job.scratch)
        if key not in self._results:
            num_writers = (
                self._saved_by if case.scenario.checkpoint is CheckpointFit.OTHER_WORLD else self._place.world_size
            )
            self._results[key] = self._write(case, number, num_writers)
        result = self._results[key]
        return dataclasses.replace(result, **make_case_fields(case)) if result is not None else None

    def _write(self, case: Case, number: int, num_writers: int) -> CaseResult | None:
        began = time.monotonic()
        reports: list[RankReport] = []
        if num_writers:
            start = StartWorker.for_case(case, len(self._results) + 1, task="save")
            places = [Place(rank=r, world_size=num_writers, local_rank=r, num_nodes=1) for r in range(num_writers)]
            runs = [functools.partial(worker.run, place, self._job, start) for place in places]
            with contextlib.closing(WorkerGroup(runs, self._limits, self._interruption.check)) as group:
                reports = group.wait_until_started()
                if all(report.ready is not None for report in reports):
                    reports = group.perform(str(number))
        verdict = _judge(reports, num_writers)
        if verdict.kind == "ok":
            return None
        return make_result(case, verdict, reports, time.monotonic() - began)


def _judge(reports: Sequence[RankReport], num_writers: int) -> Verdict:
    """Returns the verdict on the save of a checkpoint. A failed save is not a failure of the method that loads."""
    if not num_writers:
        reason = "there is only one device here, so only 1 rank can save the checkpoint"
        return Verdict(kind="unsupported", reason=reason)
    before = f"no checkpoint of {format_count(num_writers, 'rank')}: "
    if refusals := [report.refused.reason for report in reports if report.refused]:
        return Verdict(kind="unsupported", reason=before + refusals[0])
    verdict = classify(reports, num_writers)
    if verdict.kind in ("ok", "unsupported"):
        return dataclasses.replace(verdict, reason=before + verdict.reason)
    return Verdict(kind="lost", reason=before + verdict.reason, also=verdict.also)
