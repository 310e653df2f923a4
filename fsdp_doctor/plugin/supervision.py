"""The process that supervises the ranks of a pytest run. It forks the ranks, and survives if they do not.

pytest's own process is not forked, because it may have a context on a device, and has threads. The supervising process
has imported the modules that workers need, and makes no context on a device.
"""

from __future__ import annotations

import functools
import os
from multiprocessing.connection import Connection

import torch.distributed as dist

from fsdp_doctor.errors import DoctorFault, FsdpDoctorError, Interrupted
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.plugin import rank_session
from fsdp_doctor.plugin.marks import RanksNeeded
from fsdp_doctor.plugin.rank_host import Answer, PhaseAnswer, PhaseRequest, Preparation, Refusal
from fsdp_doctor.plugin.rank_session import RankStart
from fsdp_doctor.probe import processes, worker
from fsdp_doctor.probe.deadlines import Limits
from fsdp_doctor.probe.workers import WorkerEnds, WorkerGroup, check_ready
from fsdp_doctor.verdict.classification import are_workers_whole, has_died_before

_END_SECONDS = 5.0


def main(descriptor: int) -> None:
    """Answers pytest's requests over the socket until pytest closes it."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    preparation: Preparation = connection.recv()
    processes.adopt_orphans()
    worker.import_what_all_workers_need()
    supervision = Supervision(preparation, connection)
    try:
        while True:
            connection.send(supervision.answer(connection.recv()))
    except (EOFError, OSError, Interrupted):
        pass
    finally:
        supervision.close()


class Supervision:
    """The groups of workers that tests have needed so far. A group that a test leaves in a bad state is ended."""

    def __init__(self, preparation: Preparation, connection: Connection) -> None:
        self._preparation = preparation
        self._connection = connection
        self._groups: dict[RanksNeeded, WorkerGroup] = {}
        self._stores: dict[RanksNeeded, dist.TCPStore] = {}
        self._num_generations = 0
        self._can_build_models = False

    def answer(self, request: PhaseRequest) -> Answer:
        try:
            return self._perform(request)
        except Interrupted:
            raise
        except FsdpDoctorError as error:
            return Refusal(reason=str(error), exit_code=error.exit_code)

    def close(self) -> None:
        for group in self._groups.values():
            group.end(_END_SECONDS)

    def _perform(self, request: PhaseRequest) -> PhaseAnswer:
        needs, line = request.needs, request.command.to_line()
        if request.builds_model and not self._can_build_models:
            self._can_build_models = True
            worker.import_what_cases_need()
        group = self._start_group(needs)
        reports = group.perform(line, request.timeout)
        if request.command.phase == "setup" and has_died_before(reports):
            # A side effect of an earlier test has ended a worker.
            self._retire(needs)
            group = self._start_group(needs)
            reports = group.perform(line, request.timeout)
        phases = group.read_phase_reports()
        by_themselves = all(report.record is not None and report.record.done for report in reports)
        goes_on = by_themselves and not any(report.exit for report in reports)
        over = request.command.phase == "teardown"
        if not goes_on or (over and not (are_workers_whole(reports) and request.command.still_whole)):
            self._retire(needs)
        return PhaseAnswer(reports=reports, phases=phases, goes_on=goes_on)

    def _start_group(self, needs: RanksNeeded) -> WorkerGroup:
        if needs not in self._groups:
            try:
                self._groups[needs] = self._start(needs)
            except DoctorFault:
                # Side effects of the last generation may have prevented the start.
                self._groups[needs] = self._start(needs)
        return self._groups[needs]

    def _start(self, needs: RanksNeeded) -> WorkerGroup:
        """Starts workers. Raises the workers' error if they cannot run here, and DoctorFault if they end too early."""
        self._num_generations += 1
        device = RunDevice(type=devices.resolve(needs.device))
        devices.load(device, asked=needs.device)
        # The store replaces that of torchrun's agent, and listens only on the loopback interface.
        store = self._stores[needs] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        start = RankStart(
            device=device,
            backend=needs.backend,
            generation=self._num_generations,
            store_port=store.port,
            preparation=self._preparation,
        )
        places = [Place(rank=r, world_size=needs.ranks, local_rank=r, num_nodes=1) for r in range(needs.ranks)]
        runs = [functools.partial(self._run_rank, place, start) for place in places]
        group = WorkerGroup(runs, Limits(), check=self._stop_if_pytest_ended)
        try:
            check_ready(group.wait_until_started())
        except BaseException:
            group.close()
            raise
        return group

    def _run_rank(self, place: Place, start: RankStart, ends: WorkerEnds) -> None:
        self._connection.close()
        rank_session.run(place, start, ends)

    def _stop_if_pytest_ended(self) -> None:
        """Raises Interrupted if pytest has ended.

        Call this method only while pytest waits for an answer, and so sends nothing.
        """
        if self._connection.poll():
            raise Interrupted("pytest has ended")

    def _retire(self, needs: RanksNeeded) -> None:
        self._groups.pop(needs).close()
