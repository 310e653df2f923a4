"""A merged report as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fsdp_doctor.report.layout import counted
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN
from fsdp_doctor.versions.merged import MergedCase, MergedReport, Shown


def environment_lines(merged: MergedReport) -> Iterator[str]:
    """One line for each environment: how many cases were ok there, were bad, and could not or did not run."""
    for number, environment in enumerate(merged.environments):
        shown = Counter(_count_word(merged.shown(case, number)) for case in merged.cases)
        counts = ", ".join(f"{shown[word]} {word}" for word in ("ok", "bad", "not run"))
        yield "\t".join(
            [environment.name, counts, *([] if environment.complete else [f"incomplete: {environment.ended}"])]
        )


def incomplete_lines(merged: MergedReport) -> Iterator[str]:
    """One line for each environment in which not all of the cases ran that were to."""
    for environment in merged.environments:
        if not environment.complete:
            yield f"{environment.name}\tincomplete\t{environment.ended}"


def case_lines(merged: MergedReport, only_changes: bool = False) -> Iterator[str]:
    """One line for each case, or for each that changed."""
    for case in merged.cases:
        if not only_changes or any(statement.changes for statement in case.statements):
            yield "\t".join([case.id, *(_case_words(merged, case))])


def merged_summary(merged: MergedReport) -> str:
    """One line: how many cases and environments, and how many are ok in all of them."""
    passing = sum(merged.passes(case) for case in merged.cases)
    elsewhere = sum(not merged.passes(case) and not merged.fails(case) and merged.ran(case) for case in merged.cases)
    failing = sum(merged.fails(case) for case in merged.cases)
    changed = sum(any(statement.changes for statement in case.statements) for case in merged.cases)
    missing = sum(None in case.outcomes for case in merged.cases)
    parts = [f"{passing} ok in all", f"{elsewhere} only where they ran", f"{failing} bad in one or more"]
    parts += [f"{missing} without a result in one or more"]
    return (
        f"{counted(len(merged.cases), 'case')} in {counted(len(merged.environments), 'environment')}: "
        f"{', '.join(parts)}; {changed} changed between two versions"
    )


def _case_words(merged: MergedReport, case: MergedCase) -> list[str]:
    """The statements on a case; without one, the verdict of each environment."""
    if case.statements:
        return [f"{statement.where}: {statement.text}" for statement in case.statements]
    names = [environment.name for environment in merged.environments]
    return [f"{name}: {merged.shown(case, number)}" for number, name in enumerate(names)]


def _count_word(shown: Shown) -> str:
    if shown == "not run" or shown in NOT_RUN:
        return "not run"
    return "ok" if shown in GOOD else "bad"
