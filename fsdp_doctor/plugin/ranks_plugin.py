"""In pytest's own process: has the marked tests run on ranks, phase by phase, and reports what they come to.

pytest's protocol stays what it is: a phase that fails on a rank raises here. So marks, ``-x``, reports and other
plugins see an ordinary test.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from fsdp_doctor.errors import CannotRun, DoctorFault, UsageError
from fsdp_doctor.plugin import marks
from fsdp_doctor.plugin.marks import MarkedTest
from fsdp_doctor.plugin.phase_outcome import PhaseOutcome, outcome_of
from fsdp_doctor.plugin.rank_host import RankHost
from fsdp_doctor.plugin.requests import PhaseCommand, PhaseRequest, Refusal, TestPhase
from fsdp_doctor.verdict.classification import workers_are_whole

_TOLD: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
_OUTCOME: pytest.StashKey[PhaseOutcome] = pytest.StashKey()


class RanksPlugin:
    """Registered once a test is marked."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._device: str = config.getoption("--ranks-device")
        self._hosts: dict[bool, RankHost] = {}
        self._running: MarkedTest | None = None
        self._still_whole = True
        self._num_tests = 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not any(item.get_closest_marker(name) for name in ("fsdp", "ranks")):
            return
        mistake = ""
        try:
            self._running = marks.read(item, self._device)
        except UsageError as error:
            mistake = str(error)
        if mistake:
            pytest.fail(mistake, pytrace=False)
        if isinstance(item, pytest.Function):
            # The ranks set up the fixtures, each its own.
            item.fixturenames = []
        self._num_tests += 1
        self._still_whole = True
        item.stash[_TOLD] = []
        self._have_run(item, "setup")

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if self._running is None:
            return None
        self._have_run(pyfuncitem, "call")
        return True

    # After pytest's own teardown, which must come to its end whatever the ranks' does.
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if self._running is None:
            return
        try:
            self._have_run(item, "teardown", nextitem)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        told = item.stash.get(_TOLD, None)
        if told is None:
            return report
        report.sections += told
        outcome = item.stash.get(_OUTCOME, None)
        if outcome is not None and outcome.phase == call.when:
            outcome.add_details(report)
        if report.skipped and isinstance(report.longrepr, tuple):
            # It would be a line of this file.
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
        return report

    def pytest_unconfigure(self) -> None:
        self._end_hosts()

    def _have_run(self, item: pytest.Item, phase: TestPhase, nextitem: pytest.Item | None = None) -> None:
        """Returns where the phase passed on every rank; otherwise raises what pytest understands."""
        assert self._running is not None
        command = PhaseCommand(
            phase=phase,
            file=str(item.path),
            test=item.nodeid,
            number=self._num_tests,
            next_nodes=tuple(node.nodeid for node in nextitem.listchain()) if nextitem else (),
            still_whole=self._still_whole,
        )
        request = PhaseRequest(
            needs=self._running.needs,
            command=command,
            timeout=self._running.timeout,
            builds_model=item.get_closest_marker("fsdp") is not None,
        )
        try:
            answer = self._host(request).ask(request)
        except DoctorFault as error:
            self._running = None
            self._end_hosts()
            pytest.fail(str(error), pytrace=False)
        except BaseException:
            # Of another plugin's time limit, or Ctrl-C: the ranks are still at it.
            self._running = None
            self._end_hosts()
            raise
        if isinstance(answer, Refusal):
            self._running = None
            if answer.exit_code == CannotRun.exit_code:
                pytest.skip(answer.reason)
            pytest.fail(answer.reason, pytrace=False)
        outcome = item.stash[_OUTCOME] = outcome_of(self._config, phase, answer)
        item.stash[_TOLD] += outcome.told
        if self._config.getoption("capture") == "no":
            for title, text in outcome.told:
                sys.stdout.write(f"\n[{title}]\n{text}")
        self._still_whole = self._still_whole and outcome.alike and workers_are_whole(answer.reports)
        if not answer.goes_on:
            self._running = None
        outcome.raise_if_not_passed()

    def _host(self, request: PhaseRequest) -> RankHost:
        """CUDA must be hidden from the emulated device, and then it stays hidden: that is a process of its own."""
        hides_cuda = request.needs.device == "emulated"
        if hides_cuda not in self._hosts:
            self._hosts[hides_cuda] = RankHost(self._config)
        return self._hosts[hides_cuda]

    def _end_hosts(self) -> None:
        while self._hosts:
            self._hosts.popitem()[1].close()
