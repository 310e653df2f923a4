"""Runs the marked tests on ranks from pytest's process, phase by phase, and reports how they end.

A phase that fails on a rank raises in this process, too, so that marks, ``-x``, reports and other plugins see an
ordinary test.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_doctor.errors import CannotRun, DoctorFault, UsageError
from fsdp_doctor.plugin import marks
from fsdp_doctor.plugin.frames import select_frames
from fsdp_doctor.plugin.marks import MarkedTest
from fsdp_doctor.plugin.rank_host import PhaseAnswer, PhaseCommand, PhaseRequest, RankHost, Refusal, TestPhase
from fsdp_doctor.verdict.classification import Verdict, are_workers_whole, classify, fold, name_ranks
from fsdp_doctor.verdict.records import RankReport

_Section = tuple[str, str]
# faulthandler writes this for a thread that runs only C++.
_NO_FRAME = "<no Python frame>"
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
# The most lines of all ranks' sections on a failure, unless the user asks for another style of tracebacks.
_MOST_LINES = 24
_PRINTED: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
_LIMIT: pytest.StashKey[float] = pytest.StashKey()
_OUTCOME: pytest.StashKey[PhaseOutcome] = pytest.StashKey()


class RanksPlugin:
    """The plugin in pytest's own process, which is registered if a collected test is marked."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._device: str = config.getoption("--ranks-device")
        self._hosts: dict[bool, RankHost] = {}
        self._running: MarkedTest | None = None
        self._still_whole = True
        self._num_tests = 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not _is_marked(item):
            return
        mistake = ""
        try:
            self._running = marks.read(item, self._device)
        except UsageError as error:
            mistake = str(error)
        if mistake:
            pytest.fail(mistake, pytrace=False)
        if isinstance(item, pytest.Function):
            # This process sets up no fixtures, because each rank sets up its own.
            item.fixturenames = []
        self._num_tests += 1
        self._still_whole = True
        item.stash[_PRINTED] = []
        self._run_on_ranks(item, "setup")

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Passes pytest-timeout's time limit to the ranks. When the limit is reached, the ranks' stacks are shown."""
        if not _is_marked(item):
            return None
        item.stash[_LIMIT] = settings.timeout
        return True

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if self._running is None:
            return None
        self._run_on_ranks(pyfuncitem, "call")
        return True

    # Runs after pytest's own teardown, which must end regardless of the ranks' teardown.
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if self._running is None:
            return
        try:
            self._run_on_ranks(item, "teardown", nextitem)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        printed = item.stash.get(_PRINTED, None)
        if printed is None:
            return report
        report.sections += printed
        outcome = item.stash.get(_OUTCOME, None)
        if outcome is not None and outcome.phase == call.when:
            outcome.add_details(report)
        if report.skipped and isinstance(report.longrepr, tuple):
            # Without this, pytest would name a line of this file.
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
        return report

    def pytest_unconfigure(self) -> None:
        self._end_hosts()

    def _run_on_ranks(self, item: pytest.Item, phase: TestPhase, nextitem: pytest.Item | None = None) -> None:
        """Runs a phase on the ranks. Fails, skips or xfails the test if the phase did not pass on every rank."""
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
            timeout=min(filter(None, (self._running.timeout, item.stash.get(_LIMIT, None))), default=None),
            builds_model=item.get_closest_marker("fsdp") is not None,
        )
        try:
            answer = self._start_host(request).ask(request)
        except DoctorFault as error:
            self._running = None
            self._end_hosts()
            pytest.fail(str(error), pytrace=False)
        except BaseException:
            # Another plugin's time limit or Ctrl-C interrupted the wait, so that the ranks are still running.
            self._running = None
            self._end_hosts()
            raise
        if isinstance(answer, Refusal):
            self._running = None
            if answer.exit_code == CannotRun.exit_code:
                pytest.skip(answer.reason)
            pytest.fail(answer.reason, pytrace=False)
        outcome = item.stash[_OUTCOME] = make_outcome(self._config, phase, answer)
        item.stash[_PRINTED] += outcome.printed
        if self._config.getoption("capture") == "no":
            for title, text in outcome.printed:
                sys.stdout.write(f"\n[{title}]\n{text}")
        self._still_whole = self._still_whole and outcome.alike and are_workers_whole(answer.reports)
        if not answer.goes_on:
            self._running = None
        outcome.raise_if_not_passed()

    def _start_host(self, request: PhaseRequest) -> RankHost:
        """Returns the process for the request. The emulated device has its own process, in which CUDA is hidden."""
        hides_cuda = request.needs.device == "emulated"
        if hides_cuda not in self._hosts:
            self._hosts[hides_cuda] = RankHost(self._config)
        return self._hosts[hides_cuda]

    def _end_hosts(self) -> None:
        while self._hosts:
            self._hosts.popitem()[1].close()


@dataclass(frozen=True, kw_only=True)
class PhaseOutcome:
    """The result of a phase, over all ranks.

    skipped: the ranks whose own pytest skipped the test.
    xfailed: the ranks whose own pytest expected the test's failure.
    silent: the ranks whose own pytest reported nothing.
    reason: the reason of the ranks that skipped the test or expected its failure.
    details: sections on a failure.
    printed: output and logs.
    """

    phase: TestPhase
    verdict: Verdict
    skipped: tuple[int, ...]
    xfailed: tuple[int, ...]
    silent: tuple[int, ...]
    num_ranks: int
    reason: str
    details: tuple[_Section, ...]
    printed: tuple[_Section, ...]

    @property
    def alike(self) -> bool:
        """Returns whether every rank ended in the same way.

        This is so if all ranks or none were skipped, all or none xfailed, and a bad verdict names all ranks.
        """
        same = len(self.skipped) in (0, self.num_ranks) and len(self.xfailed) in (0, self.num_ranks)
        return same and (not self.verdict.bad or len(self.verdict.ranks) == self.num_ranks)

    def raise_if_not_passed(self) -> None:
        if self.verdict.bad:
            kind = "" if self.verdict.kind == "crash" else f"{self.verdict.kind}: "
            # The exception of pytest.fail() is raised again here, which adds its name once more.
            reason = self.verdict.reason.replace("Failed: ", "", 1)
            # If only some ranks failed, the reason already names them.
            raised = not kind and reason == self.verdict.reason
            where = "every rank: " if raised and len(self.verdict.ranks) == self.num_ranks > 1 else ""
            pytest.fail("\n".join([where + kind + reason, *self.verdict.also]), pytrace=False)
        if self.silent and self.phase != "teardown":
            pytest.fail(f"{name_ranks(self.silent)} reported nothing of the test", pytrace=False)
        if self.xfailed:
            pytest.xfail(self.reason)
        if len(self.skipped) == self.num_ranks:
            pytest.skip(self.reason)
        if self.skipped:
            pytest.fail(
                f"skipped on {name_ranks(self.skipped)}, but not on the other ranks: {self.reason}", pytrace=False
            )

    def add_details(self, report: pytest.TestReport) -> None:
        """Adds the ranks' sections on a failure to pytest's report of the phase."""
        add_section = getattr(report.longrepr, "addsection", None)
        if add_section is not None:
            for title, text in self.details:
                add_section(title, text)


def make_outcome(config: pytest.Config, phase: TestPhase, answer: PhaseAnswer) -> PhaseOutcome:
    reports = {
        rank: config.hook.pytest_report_from_serializable(config=config, data=phase_report.report)
        for rank, phase_report in enumerate(answer.phases)
        if phase_report is not None
    }
    xfailed = {rank: each.xfailed for rank, each in enumerate(answer.phases) if each and each.xfailed is not None}
    skipped = {rank: report.longrepr for rank, report in reports.items() if report.skipped}
    failed = {rank: str(r.longrepr) for rank, r in reports.items() if r.failed and rank not in xfailed}
    details = [*_group_by_text(failed), *_describe_lost_ranks(answer.reports, failed)]
    reasons = [*xfailed.values(), *(reason.removeprefix("Skipped: ") for _, _, reason in skipped.values())]
    printed: list[_Section] = []
    for report in answer.reports:
        of_rank, own = name_ranks([report.rank]), reports.get(report.rank)
        if report.output.strip():
            printed.append((f"Captured stdout {phase} of {of_rank}, with stderr", report.output))
        printed += [(f"{title} of {of_rank}", text) for title, text in (own.sections if own else ())]
    return PhaseOutcome(
        phase=phase,
        verdict=classify(answer.reports, len(answer.reports)),
        skipped=tuple(skipped),
        xfailed=tuple(xfailed),
        silent=tuple(rank for rank in range(len(answer.reports)) if rank not in reports),
        num_ranks=len(answer.reports),
        reason=reasons[0] if reasons else "",
        details=_shorten(details) if config.getoption("tbstyle") == "auto" else tuple(details),
        printed=tuple(printed),
    )


def _group_by_text(texts: dict[int, str]) -> list[_Section]:
    """Makes one section for each text, with all ranks whose texts differ only in the device's index or in addresses."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(_ADDRESS.sub("0x", fold(text)), []).append(rank)
    return [(name_ranks(ranks), texts[ranks[0]]) for ranks in ranks_of.values()]


def _describe_lost_ranks(reports: list[RankReport], failed: dict[int, str]) -> list[_Section]:
    """Describes ranks that could not report themselves how they ended, in one section each."""
    sections = []
    stacks: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        failure = report.record.failure if report.record is not None else None
        if failure is not None and report.rank not in failed:
            sections.append((name_ranks([report.rank]), f"{failure.type}: {failure.message}\n{failure.traceback}"))
        if report.exit:
            sections.append((name_ranks([report.rank]), f"ended with {report.exit}"))
        if report.stack:
            stack = _ADDRESS.sub("0x", _select_test_frames(report.stack))
            stacks.setdefault((report.stopped_detail, stack), []).append(report.rank)
    stopped = [(f"{name_ranks(ranks)}, stopped: {detail}", stack) for (detail, stack), ranks in stacks.items()]
    return [*sections, *stopped]


def _select_test_frames(stack: str) -> str:
    """Returns each thread's stack without the frames of libraries, of pytest and of its callers.

    The innermost frame is kept.
    """
    threads = re.split(r"\n(?=Thread |Current thread )", stack)
    shown = []
    for thread in threads:
        if _NO_FRAME not in thread:
            heading, *lines = thread.splitlines()
            frames = "\n".join(itertools.takewhile(lambda line: 'File "_pytest/' not in line, lines))
            shown.append("\n".join([heading, select_frames(frames, kept=0)]))
    return "\n".join(shown)


def _shorten(sections: Sequence[_Section]) -> tuple[_Section, ...]:
    """Shortens sections to _MOST_LINES in total.

    The last lines of each section are kept. Ranks whose sections do not fit are only named.
    """
    shown: list[_Section] = []
    left = _MOST_LINES
    for title, text in sections:
        lines = text.splitlines()
        if shown and len(lines) + 1 > left:
            break
        most = left - 1
        if len(lines) > most:
            lines = [f"... {len(lines) - most + 1} more lines: --tb=long shows all", *lines[1 - most :]]
        shown.append((title, "\n".join(lines)))
        left -= len(lines) + 1
    if rest := [title for title, _ in sections[len(shown) :]]:
        shown.append(("--tb=long shows the others", "; ".join(rest)))
    return tuple(shown)


def _is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("fsdp", "ranks"))
