"""From what every rank says of a phase to the one report that pytest gets of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from fsdp_doctor.plugin.requests import PhaseAnswer, TestPhase
from fsdp_doctor.verdict.classification import Verdict, classify
from fsdp_doctor.verdict.records import RankReport

_Section = tuple[str, str]
# What faulthandler says of a thread of C++.
_NO_FRAME = "<no Python frame>"


@dataclass(frozen=True, kw_only=True)
class PhaseOutcome:
    """verdict: over all ranks. skipped, xfailed: the ranks whose own pytest says so.

    silent: those whose pytest said nothing. reason: of those that skipped or were expected to fail.
    details: a section for each thing to be told of a failure. told: what the ranks printed and logged.
    """

    phase: TestPhase
    verdict: Verdict
    skipped: tuple[int, ...]
    xfailed: tuple[int, ...]
    silent: tuple[int, ...]
    num_ranks: int
    reason: str
    details: tuple[_Section, ...]
    told: tuple[_Section, ...]

    @property
    def alike(self) -> bool:
        """Whether every rank ended in the same way, or the verdict names all of them."""
        same = len(self.skipped) in (0, self.num_ranks) and len(self.xfailed) in (0, self.num_ranks)
        return same and (not self.verdict.bad or len(self.verdict.ranks) == self.num_ranks)

    def raise_if_not_passed(self) -> None:
        if self.verdict.bad:
            kind = "" if self.verdict.kind == "crash" else f"{self.verdict.kind}: "
            # What pytest.fail() raises is named so again where it is raised here.
            reason = self.verdict.reason.replace("Failed: ", "", 1)
            pytest.fail("\n".join([kind + reason, *self.verdict.also]), pytrace=False)
        if self.silent and self.phase != "teardown":
            pytest.fail(f"nothing was said of the test by {_ranks(self.silent)}", pytrace=False)
        if self.xfailed:
            pytest.xfail(self.reason)
        if len(self.skipped) == self.num_ranks:
            pytest.skip(self.reason)
        if self.skipped:
            pytest.fail(f"skipped on {_ranks(self.skipped)} and not on the others: {self.reason}", pytrace=False)

    def add_details(self, report: pytest.TestReport) -> None:
        """Puts what the ranks said of a failure into pytest's report of the phase."""
        add_section = getattr(report.longrepr, "addsection", None)
        if add_section is not None:
            for title, text in self.details:
                add_section(title, text)


def outcome_of(config: pytest.Config, phase: TestPhase, answer: PhaseAnswer) -> PhaseOutcome:
    reports = {
        rank: config.hook.pytest_report_from_serializable(config=config, data=said.report)
        for rank, said in enumerate(answer.phases)
        if said is not None
    }
    xfailed = {rank: said.xfailed for rank, said in enumerate(answer.phases) if said and said.xfailed is not None}
    skipped = {rank: report.longrepr for rank, report in reports.items() if report.skipped}
    failed = {rank: str(r.longrepr) for rank, r in reports.items() if r.failed and rank not in xfailed}
    reasons = [*xfailed.values(), *(said[2].removeprefix("Skipped: ") for said in skipped.values())]
    return PhaseOutcome(
        phase=phase,
        verdict=classify(answer.reports, len(answer.reports)),
        skipped=tuple(skipped),
        xfailed=tuple(xfailed),
        silent=tuple(rank for rank in range(len(answer.reports)) if rank not in reports),
        num_ranks=len(answer.reports),
        reason=reasons[0] if reasons else "",
        details=(*_alike(failed), *_seen_from_outside(answer.reports, failed)),
        told=tuple(section for report in answer.reports for section in _told(report, reports.get(report.rank), phase)),
    )


def _alike(texts: dict[int, str]) -> list[_Section]:
    """What several ranks say in the same words is said once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return [(_ranks(ranks), text) for text, ranks in ranks_of.items()]


def _seen_from_outside(reports: list[RankReport], failed: dict[int, str]) -> list[_Section]:
    """What the supervisor knows of ranks that could not say it."""
    sections = []
    for report in reports:
        failure = report.record.failure if report.record is not None else None
        if failure is not None and report.rank not in failed:
            sections.append((_ranks([report.rank]), f"{failure.type}: {failure.message}\n{failure.traceback}"))
        if report.exit:
            sections.append((_ranks([report.rank]), f"ended with {report.exit}"))
        if report.stack:
            sections.append((f"{_ranks([report.rank])}, stopped: {report.stopped_detail}", _of_the_test(report.stack)))
    return sections


def _of_the_test(stack: str) -> str:
    """Each thread's stack without the frames of pytest, and of what called pytest."""
    threads = re.split(r"\n(?=Thread |Current thread )", stack)
    return "\n".join("".join(_until_pytest(thread)) for thread in threads if _NO_FRAME not in thread)


def _until_pytest(thread: str) -> Iterator[str]:
    return itertools.takewhile(lambda line: 'File "_pytest/' not in line, thread.splitlines(keepends=True))


def _told(report: RankReport, said: pytest.TestReport | None, phase: TestPhase) -> list[_Section]:
    of_rank = _ranks([report.rank])
    printed = [(f"Captured stdout {phase} of {of_rank}, with stderr", report.output)] if report.output.strip() else []
    return printed + [(f"{title} of {of_rank}", text) for title, text in (said.sections if said else ())]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
