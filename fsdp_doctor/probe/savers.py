"""The processes that save what other processes load: a generation of workers of its own for each checkpoint.

Rank 0's supervisor looks after all of them, so their number is not that of the run's ranks.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

from fsdp_doctor.case.checkpoints import directory_of
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.paths import find_path, impossible
from fsdp_doctor.probe.instructions import start_for
from fsdp_doctor.probe.job import Job, Limits
from fsdp_doctor.probe.supervisor import Interruption
from fsdp_doctor.probe.worker_process import WorkerProcess
from fsdp_doctor.report.document import CaseResult, result_of
from fsdp_doctor.verdict.classification import Verdict, classify
from fsdp_doctor.verdict.records import RankReport, Stop

_POLL_SECONDS = 0.02


def number_of_savers(asked: int | None, world_size: int, device_type: str) -> int:
    """How many ranks save what ``world_size`` others load: as asked, else one more, or one less for want of a device.

    Raises UsageError where the number that is asked for is no other one.
    """
    if asked == world_size:
        raise UsageError(
            f"--saved-by {asked} is this run's own number of ranks, for which there is --checkpoint other-run; "
            "give another number"
        )
    more = devices.count(device_type) > world_size
    return asked or (world_size + 1 if more else world_size - 1)


class Savers:
    """Has each checkpoint saved once, when the first case that is given it is about to run.

    place: of rank 0. saved_by: how many ranks save a checkpoint of another number of ranks.
    """

    def __init__(self, place: Place, job: Job, limits: Limits, interruption: Interruption, *, saved_by: int) -> None:
        self._place = place
        self._job = job
        self._limits = limits
        self._interruption = interruption
        self._saved_by = saved_by
        self._without: dict[pathlib.Path, CaseResult | None] = {}

    def result_without(self, number: int) -> CaseResult | None:
        """The result of a case whose checkpoint cannot be had; None where the case can run.

        Raises Interrupted if a signal comes meanwhile.
        """
        case = self._job.cases[number]
        if isinstance(case, FrameworkCase):
            # What it loads, a generation of the conductor's saves.
            return None
        cannot_be_tried = impossible(find_path(case.path, case.scenario.version), case.scenario)
        if not case.scenario.saved_elsewhere or cannot_be_tried or self._place.num_nodes > 1:
            return None
        key = directory_of(case.scenario, self._job.scratch)
        if key not in self._without:
            num_savers = self._place.world_size if case.scenario.checkpoint == "other-run" else self._saved_by
            self._without[key] = self._save(case, number, num_savers)
        result = self._without[key]
        return dataclasses.replace(result, case=case) if result is not None else None

    def _save(self, case: Case, number: int, num_savers: int) -> CaseResult | None:
        began = time.monotonic()
        reports = self._reports(case, number, num_savers) if num_savers else []
        verdict = _verdict(reports, num_savers)
        if verdict.kind == "ok":
            return None
        return result_of(case, verdict, reports, time.monotonic() - began)

    def _reports(self, case: Case, number: int, num_savers: int) -> list[RankReport]:
        start = start_for(case, len(self._without) + 1, task="save")
        savers: list[WorkerProcess] = []
        try:
            for rank in range(num_savers):
                place = Place(rank=rank, world_size=num_savers, local_rank=rank, num_nodes=1)
                savers.append(WorkerProcess(place, self._job, start))
            self._wait_for(savers)
            if not any(saver.in_trouble for saver in savers):
                for saver in savers:
                    saver.begin(number)
                self._wait_for(savers)
            return [saver.report() for saver in savers]
        finally:
            for saver in savers:
                saver.kill()

    def _wait_for(self, savers: Sequence[WorkerProcess]) -> None:
        """Until all are through with what they were told, or have been stopped."""
        began = time.monotonic()
        trouble_at: float | None = None
        while not all(saver.settled for saver in savers):
            self._interruption.check()
            for saver in savers:
                saver.pump(_POLL_SECONDS / len(savers))
                saver.keep_within(self._limits.host_bytes)
            now = time.monotonic()
            if trouble_at is None and any(saver.in_trouble for saver in savers):
                trouble_at = now
            if trouble_at is not None and now - trouble_at > self._limits.grace:
                _stop(savers, "others", "still at it when another rank was in trouble")
            elif now - began > self._limits.start:
                _stop(savers, "deadline", f"not done after {self._limits.start:g} s")


def _stop(savers: Sequence[WorkerProcess], why: Stop, detail: str) -> None:
    for saver in savers:
        saver.stop(why, detail)


def _verdict(reports: Sequence[RankReport], num_savers: int) -> Verdict:
    """On a case that is given what they saved. That they could not is no fault of the path under test."""
    if not num_savers:
        reason = "there is one device here, so no other number of ranks than 1 can save the checkpoint"
        return Verdict(kind="unsupported", reason=reason)
    before = f"no checkpoint of {num_savers} {'rank' if num_savers == 1 else 'ranks'}: "
    if refusals := [report.refused.reason for report in reports if report.refused]:
        return Verdict(kind="unsupported", reason=before + refusals[0])
    verdict = classify(reports, num_savers)
    if verdict.kind in ("ok", "unsupported"):
        return dataclasses.replace(verdict, reason=before + verdict.reason)
    return Verdict(kind="lost", reason=before + verdict.reason, also=verdict.also)
