"""The processes that save what other processes load: a generation of workers of its own for each checkpoint.

Rank 0's supervisor looks after all of them, so their number is not that of the run's ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from fsdp_doctor.probe import worker
from fsdp_doctor.probe.instructions import start_for
from fsdp_doctor.probe.job import Job, Limits
from fsdp_doctor.probe.supervisor import Interruption
from fsdp_doctor.probe.worker_group import WorkerGroup
from fsdp_doctor.report.document import CaseResult, result_of
from fsdp_doctor.verdict.classification import Verdict, classify
from fsdp_doctor.verdict.records import RankReport


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
        if not case.scenario.checkpoint.saved_elsewhere or cannot_be_tried or self._place.num_nodes > 1:
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
        places = [Place(rank=r, world_size=num_savers, local_rank=r, num_nodes=1) for r in range(num_savers)]
        runs = [functools.partial(worker.run, place, self._job, start) for place in places]
        with contextlib.closing(WorkerGroup(runs, self._limits, self._interruption.check)) as savers:
            reports = savers.started()
            ready = all(report.ready is not None for report in reports)
            return savers.perform(str(number)) if ready else reports


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
