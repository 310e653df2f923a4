"""The processes that save what other processes load: a generation of workers of its own for each checkpoint.

Rank 0's supervisor looks after all of them, so their number is not that of the run's ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fsdp_doctor.case.checkpoints import directory_of
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.paths import find_path, impossible
from fsdp_doctor.probe.instructions import StartWorker
from fsdp_doctor.probe.job import Job, Limits
from fsdp_doctor.probe.supervisor import Interruption
from fsdp_doctor.probe.worker_process import WorkerProcess
from fsdp_doctor.verdict.classification import Verdict, VerdictKind, classify
from fsdp_doctor.verdict.records import RankReport, Stop

_POLL_SECONDS = 0.02


def other_number(world_size: int, device_type: str) -> int:
    """How many ranks save for ``world_size`` others where nobody said: one more, or one less for want of a device."""
    return world_size + 1 if devices.count(device_type) > world_size else world_size - 1


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
        self._outcomes: dict[str, Verdict | None] = {}

    def verdict_without(self, number: int) -> Verdict | None:
        """The verdict on a case whose checkpoint cannot be had; None where the case can run.

        Raises Interrupted if a signal comes meanwhile.
        """
        case = self._job.cases[number]
        cannot_be_tried = impossible(find_path(case.path, case.scenario.version), case.scenario)
        if not case.scenario.saved_elsewhere or cannot_be_tried or self._place.num_nodes > 1:
            return None
        key = str(directory_of(case.scenario, self._job.scratch))
        if key not in self._outcomes:
            self._outcomes[key] = self._save(number, self._num_savers(case.scenario))
        return self._outcomes[key]

    def _num_savers(self, scenario: Scenario) -> int:
        return self._place.world_size if scenario.checkpoint == "other-run" else self._saved_by

    def _save(self, number: int, num_savers: int) -> Verdict | None:
        scenario = self._job.cases[number].scenario
        if scenario.checkpoint == "other-world":
            if num_savers == 0:
                return _unsupported("there is one device, and no other number of ranks than 1 to save the checkpoint")
            if num_savers == self._place.world_size:
                return _unsupported(f"--saved-by {num_savers} is the number of ranks that load; see other-run")
        start = StartWorker(generation=len(self._outcomes) + 1, backend=scenario.backend, task="save")
        reports = self._reports(number, start, num_savers)
        refusal = next((report.refused.reason for report in reports if report.refused), "")
        verdict = _unsupported(refusal) if refusal else classify(reports, num_savers)
        if verdict.kind == "ok":
            return None
        kind: VerdictKind = "unsupported" if verdict.kind == "unsupported" else "lost"
        ranks = "1 rank" if num_savers == 1 else f"{num_savers} ranks"
        return Verdict(kind=kind, reason=f"no checkpoint of {ranks}: {verdict.reason}", also=verdict.also)

    def _reports(self, number: int, start: StartWorker, num_savers: int) -> list[RankReport]:
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


def _unsupported(reason: str) -> Verdict:
    return Verdict(kind="unsupported", reason=reason)
