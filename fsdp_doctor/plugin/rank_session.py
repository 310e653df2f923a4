"""A pytest session on one rank. It imports the tests itself, and runs one phase of a test for each command."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from fsdp_doctor.errors import FsdpDoctorError, UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.environment import collect_of_torch
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Backend
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.plugin import REGISTERED_AS
from fsdp_doctor.plugin.frames import leave_out_libraries
from fsdp_doctor.plugin.marks import read_contract
from fsdp_doctor.plugin.rank_host import PhaseCommand, Preparation
from fsdp_doctor.probe.workers import WorkerEnds
from fsdp_doctor.verdict.records import Failure, PhaseReport, Ready, Record, Refused, make_failure

if TYPE_CHECKING:
    from fsdp_doctor.case.runtime import Runtime
    from fsdp_doctor.plugin.fixtures import FsdpCase, ThisRank


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """The settings that the workers of one generation share. A generation is the workers started together on all ranks.

    generation: the number of the generation in this run of pytest.
    store_port: the port of the store on this node.
    """

    device: RunDevice
    backend: Backend
    generation: int
    store_port: int
    preparation: Preparation


def run(place: Place, start: RankStart, ends: WorkerEnds) -> None:
    """Runs a worker: joins the other ranks, then carries out commands until there are no more."""
    ends.write_stacks()
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(start.store_port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= place.variables | agent
    directory = start.preparation.scratch / f"generation-{start.generation}"
    directory.mkdir(exist_ok=True)
    try:
        runtime = _join(place, start, directory)
        options = start.preparation.options | {"basetemp": str(directory / f"rank-{place.rank}")}
        config = pytest.Config.fromdictargs(options, start.preparation.args)
    except FsdpDoctorError as error:
        ends.send(Refused(reason=str(error), exit_code=error.exit_code))
        return
    except pytest.UsageError as error:
        ends.send(Refused(reason=str(error), exit_code=UsageError.exit_code))
        return
    # A rank prints no report, but pytest needs a reporter to explain a failing assert.
    config.pluginmanager.register(pytest.TerminalReporter(config, open(os.devnull, "w")), "terminalreporter")
    # If the user asks for another style, all frames are kept.
    shortens = config.option.tbstyle == "auto"
    config.option.tbstyle = "short" if shortens else config.option.tbstyle
    config.pluginmanager.register(RankSession(ends, runtime, shortens=shortens), REGISTERED_AS)
    config.hook.pytest_cmdline_main(config=config)


def find_session(request: pytest.FixtureRequest) -> RankSession:
    """Finds the session in which a fixture is set up. Fails the test if there is none."""
    session = request.config.pluginmanager.get_plugin(REGISTERED_AS)
    if not isinstance(session, RankSession):
        pytest.fail(f"{request.fixturename} is for tests marked fsdp or ranks, but this test is not", pytrace=False)
    return session


def _refuse_debugger(*arguments: object, **named: object) -> None:
    __tracebackhide__ = True
    raise UsageError(
        "breakpoint() cannot read a terminal on the ranks of a test: give the test timeout=3600, and call a debugger "
        "that listens on a port, such as debugpy or remote-pdb, on one rank, or name it in PYTHONBREAKPOINT"
    )


class RankSession:
    """A plugin for this rank's pytest, which collects a file when a command first names a test in it.

    shortens: whether the frames of installed packages are removed from tracebacks, except the last frame.
    """

    def __init__(self, ends: WorkerEnds, runtime: Runtime, *, shortens: bool) -> None:
        from fsdp_doctor.case.case_runner import CaseRunner
        from fsdp_doctor.case.side_effects import SideEffects
        from fsdp_doctor.plugin.fixtures import KeptScenarios

        self._ends = ends
        self._runtime = runtime
        self._shortens = shortens
        self._commands: Iterator[PhaseCommand] = (
            PhaseCommand(**json.loads(line)) for line in ends.channel.makefile("r")
        )
        self._command: PhaseCommand
        self._side_effects = SideEffects(runtime.device)
        self._runner = CaseRunner(runtime, (), report=ends.send)
        self._scenarios = KeptScenarios()
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._collection_errors: list[pytest.CollectReport] = []
        self._retire = ""

    def pytest_collection(self) -> bool:
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self) -> bool:
        """Leaves the time limit to the supervisor, which stops all ranks together."""
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = _refuse_debugger
        self._ends.send(Ready(environment=collect_of_torch()))
        for command in self._commands:
            self._command = command
            self._report_begin()
            if command.phase != "setup":
                # This rank does not collect the test.
                self._report_end(None)
            elif (item := self._find(session)) is not None:
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Runs the phases of a test within pytest's hooks, which add assertion introspection and warning filters.

        Returns True, so that pytest does not run the test itself.
        """
        self._run_phase(item, lambda: self._set_up(item))
        for command in self._commands:
            self._command = command
            self._report_begin()
            if command.phase == "teardown":
                self._run_phase(item, lambda: self._tear_down(item))
                break
            self._side_effects.look_before()
            self._run_phase(item, lambda: item.ihook.pytest_runtest_call(item=item), self._side_effects.undo)
        if isinstance(item, pytest.Function):
            # Releases the objects that the test's fixtures hold, and allows the test to run again.
            item._initrequest()
        return True

    @property
    def this_rank(self) -> ThisRank:
        from fsdp_doctor.plugin.fixtures import ThisRank

        scratch = self._runtime.scratch / f"test-{self._command.number}"
        scratch.mkdir(parents=True, exist_ok=True)
        return ThisRank(
            rank=self._runtime.rank,
            world_size=self._runtime.world_size,
            device=self._runtime.device,
            control=self._runtime.control,
            scratch=scratch,
        )

    def fsdp_case(self, request: pytest.FixtureRequest) -> FsdpCase:
        """Returns the scenario that the test's mark names, built anew or kept from an earlier test."""
        from fsdp_doctor.plugin.fixtures import FsdpCase

        if not hasattr(request, "param"):
            pytest.fail("fsdp_case is for tests marked fsdp, but this test is marked ranks", pytrace=False)
        run, steps = self._runner.open(Case(request.param, "test:function"), read_contract(request.function))
        return FsdpCase(run, steps, request.param, self._scenarios, self.this_rank)

    def _set_up(self, item: pytest.Item) -> None:
        # If tests do not run in the order of collection, as under xdist, a fixture of the last test may be left.
        item.session._setupstate.teardown_exact(item)
        item.ihook.pytest_runtest_setup(item=item)

    def _tear_down(self, item: pytest.Item) -> None:
        stays = [node for node in item.listchain()[:-1] if node.nodeid in self._command.next_nodes]
        item.ihook.pytest_runtest_teardown(item=item, nextitem=stays[-1] if stays else None)
        if self._command.still_whole and not self._runtime.check_group():
            pytest.fail(
                "a collective after the test gives a wrong sum: a collective of the test was not called by all "
                "ranks alike",
                pytrace=False,
            )

    def _run_phase(self, item: pytest.Item, run: Callable[[], object], undo: Callable[[], str] = str) -> None:
        """Runs a phase of a test and reports how it ended.

        undo: a function that reverts side effects of the phase, and returns the reason to retire this worker; empty if
            there is none.
        """
        call = pytest.CallInfo.from_call(run, when=self._command.phase)
        if call.excinfo is not None and self._shortens:
            leave_out_libraries(call.excinfo.value)
        self._retire = self._retire or undo()
        # The hook is called for its effects on this rank, such as on tmp_path. pytest's own process judges the marks.
        item.ihook.pytest_runtest_makereport(item=item, call=call)
        report = pytest.TestReport.from_item_and_call(item, call)  # type: ignore[arg-type]
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        raised = call.excinfo.value if call.excinfo is not None else None
        xfailed = str(raised.msg) if isinstance(raised, pytest.xfail.Exception) else None
        # A report can contain the user's objects, which JSON cannot encode.
        self._ends.send(PhaseReport(report=json.loads(json.dumps(data, default=str)), xfailed=xfailed))
        failed = raised if report.failed and xfailed is None else None
        self._report_end(make_failure(failed) if failed is not None else None)

    def _find(self, session: pytest.Session) -> pytest.Item | None:
        """Finds the test of the command. If this rank does not collect it, reports the reason and returns None."""
        wanted, file = _name_in_file(self._command.test), self._command.file
        try:
            if file not in self._items:
                self._items[file] = {_name_in_file(item.nodeid): item for item in session.perform_collect([file])}
        except Exception as error:
            self._report_end(make_failure(error))
            return None
        if (item := self._items[file].get(wanted)) is not None:
            return item
        why = "\n".join(str(report.longrepr) for report in self._collection_errors)
        message = "this rank does not collect the test" + (": its file raises when it is imported" if why else "")
        self._report_end(Failure(type="CollectError", message=message, traceback=why, time=time.time()))
        return None

    def _report_begin(self) -> None:
        self._ends.send(Record(case_id=self._command.test, stage="test"))

    def _report_end(self, failure: Failure | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        retire = self._retire or ("" if self._scenarios.whole else "the ranks ended a case differently")
        self._ends.send(Record(case_id=self._command.test, stage="test", failure=failure, retire=retire, done=True))


def _name_in_file(node_id: str) -> str:
    """Returns a test's name in its file: the part of the node id after the first ``::``."""
    return node_id.partition("::")[2]


def _join(place: Place, start: RankStart, scratch: pathlib.Path) -> Runtime:
    import torch.distributed as dist

    from fsdp_doctor.case import runtime

    devices.check_there_is_one(start.device.type, rank=place.rank, local_rank=place.local_rank)
    store, _, _ = next(dist.rendezvous("env://"))
    return runtime.start(
        dist.PrefixStore("fsdp-doctor", store),
        place=place,
        run_device=start.device,
        backend=start.backend,
        scratch=scratch,
        custom_model=None,
    )
