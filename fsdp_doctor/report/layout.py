"""The parts that the human-readable formats share: the matrix cut into grids, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_doctor.matrix.axes import AXES, AXIS
from fsdp_doctor.matrix.cases import AnyCase, AnyScenario, Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase, FrameworkScenario
from fsdp_doctor.matrix.methods import METHOD_NAMES, find_fix
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.text import format_count
from fsdp_doctor.verdict.classification import NOT_RUN


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A rectangle of the matrix: rows are methods, columns are offloads, and the title names the other axes."""

    title: str
    methods: tuple[str, ...]
    offloads: tuple[str, ...]
    cells: dict[tuple[str, str], CaseResult]

    @property
    def uniform(self) -> CaseResult | None:
        """A result that represents all cells, if no cell ran and all have the same reason; else None."""
        kinds = {(result.verdict.kind, result.verdict.reason) for result in self.cells.values()}
        first = next(iter(self.cells.values()))
        return first if first.verdict.kind in NOT_RUN and len(kinds) == 1 else None


def make_grids(report: Report) -> list[Grid]:
    """Arranges all results in grids, in the order of the run."""
    grouped: dict[AnyScenario, dict[tuple[str, str], CaseResult]] = {}
    for result in report.results:
        scenario = result.case.scenario
        grouped.setdefault(scenario.drop_offload(), {})[result.method, str(scenario.offload)] = result
    grids = []
    for scenario, cells in grouped.items():
        if isinstance(scenario, FrameworkScenario):
            methods, offloads = tuple(method.name for method in scenario.list_methods()), scenario.list_offloads()
            words = [scenario.framework, *scenario.list_id_values(without="offload")]
        else:
            methods, offloads = METHOD_NAMES, tuple(AXIS["offload"].values)
            values = [(axis, scenario.values[axis.name]) for axis in AXES if axis.name != "offload"]
            words = [value for axis, value in values if value != axis.default or axis.always_in_id]
        grids.append(
            Grid(
                title=", ".join(words),
                methods=sort_by_table((method for method, _ in cells), methods),
                offloads=sort_by_table((offload for _, offload in cells), offloads),
                cells=cells,
            )
        )
    return grids


def sort_by_table(present: Iterable[str], order: tuple[str, ...]) -> tuple[str, ...]:
    """Sorts the names in the order of the table. Names that the table lacks, such as a user's method, come last."""
    names = dict.fromkeys(present)
    return (*(name for name in order if name in names), *(name for name in names if name not in order))


def find_fixes(report: Report) -> dict[str, CaseResult]:
    """Maps each case's id to the result of this library's own method (the fix) in the same scenario, if it ran."""
    results = {result.id: result for result in report.results}
    fixes = {case_id: _find_fixed(result.case) for case_id, result in results.items()}
    return {case_id: results[fix.id] for case_id, fix in fixes.items() if fix is not None and fix.id in results}


def _find_fixed(case: AnyCase) -> AnyCase | None:
    """Returns the case of this library's own method (the fix) in the same scenario.

    Returns the case itself if its method is the fix; None if there is no fix for its method.
    """
    if isinstance(case, FrameworkCase):
        return case if case.is_fixed else case.make_fixed()
    return Case(case.scenario, find_fix(case.method, case.scenario.version))


def summarize(report: Report) -> str:
    """Returns one line with the number of cases, in total and for each verdict."""
    kinds = Counter(result.verdict.kind for result in report.results)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    partial = f" of {report.num_selected} selected (incomplete: {report.ended or 'still running'})"
    cases, ranks = format_count(len(report.results), "case"), format_count(report.world_size, "rank")
    return f"{cases}{'' if report.complete else partial} on {ranks} of {report.device}: {counts or 'no result'}"


def rerun_command(report: Report, result: CaseResult) -> str:
    """Returns the command that runs one case alone."""
    options = f" {report.rerun_options}" if report.rerun_options else ""
    return f"fsdp-doctor probe{options} --case '{result.id}'"
