"""What a script is to reproduce: the verdict of a report, or what the catalogue knows of the case."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.machine.versions import installed_versions
from fsdp_doctor.matrix.cases import AnyCase, Case
from fsdp_doctor.matrix.frameworks import FRAMEWORKS
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.report.document import Report
from fsdp_doctor.repro.patterns import pattern_of
from fsdp_doctor.verdict.classification import NOT_RUN, VerdictKind

# What a script does not compare.
_UNSEEN = re.compile(
    r"the extraction changed \d+ of \d+ parts of the training state|requires_grad is \w+ where it was \w+"
    r"|the next training step ends otherwise than that of a run which had this state from the start"
)
_CATALOGUE = "its catalogue"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to see.

    kind: the verdict. message: a regular expression over the exception's ``Type: message``, or over what the script
    itself says of values; empty for none.
    by_every_rank: whether a crash is one also where every rank raises an exception, which can be a refusal.
    title: in words. references: of the catalogue's entry. source: where it is known from. versions: by package.
    """

    kind: VerdictKind
    message: str = ""
    by_every_rank: bool = False
    title: str = ""
    references: tuple[str, ...] = ()
    source: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def expected(case: AnyCase) -> Expectation:
    """What the catalogue knows of the case, on the torch that is installed here if there is one.

    Raises UsageError for what a script cannot see.
    """
    versions = _installed()
    context = RunContext(torch=versions.get("torch", ""), packages=versions)
    entry = next(iter(catalogue.expected_failures(case, context)), None)
    if entry is None:
        return Expectation(kind="ok", title="Nothing is known to break here", source=_CATALOGUE, versions=versions)
    if isinstance(case, Case):
        _check_that_a_script_can_see(case, entry.verdict)
    return Expectation(
        kind=entry.verdict,
        # What also shows without an exception is known by its verdict alone.
        message=entry.signatures[0].pattern if entry.signatures and not entry.symptoms else "",
        by_every_rank=True,
        title=entry.title,
        references=entry.references,
        source=_CATALOGUE,
        versions=versions,
    )


def _check_that_a_script_can_see(case: Case, kind: VerdictKind) -> None:
    """Raises UsageError for extracted values of the optimizer's state: a script has nothing to compare them with."""
    if kind == "wrong" and find_path(case.path, case.scenario.version).contract.form == "optimizer":
        raise UsageError(f"case {case.id!r}: that the optimizer's state has other values, the doctor alone can see")


@functools.cache
def _installed() -> Mapping[str, str]:
    of_frameworks = (name for matrix in FRAMEWORKS.values() for name in matrix.distributions)
    return installed_versions(dict.fromkeys(("torch", "transformers", "peft", *of_frameworks)))


def reported(case: AnyCase, report: Report) -> Expectation:
    """What a report says of the case. Raises UsageError if it has not run it."""
    result = next((result for result in report.results if result.id == case.id), None)
    if result is None:
        raise UsageError(f"the report has no case {case.id!r}")
    if result.verdict.kind in NOT_RUN:
        raise UsageError(f"case {case.id!r} is {result.verdict.kind} in the report: {result.verdict.reason}")
    if found := _UNSEEN.search(result.verdict.reason):
        raise UsageError(f"case {case.id!r}: that {found[0]}, the doctor alone can see")
    hsdp = isinstance(case, Case) and case.scenario.sharding == "hsdp"
    if report.world_size != 2 and not hsdp:
        raise UsageError(f"the report is of {report.world_size} ranks; a script starts 2, or 4 where it replicates")
    if isinstance(case, Case):
        _check_that_a_script_can_see(case, result.verdict.kind)
    known = next((entry for entry in catalogue.known_failures() if entry.id == result.known), None)
    return Expectation(
        kind=result.verdict.kind,
        message=pattern_of(result) if isinstance(case, Case) else "",
        by_every_rank=len(result.verdict.ranks) == report.world_size,
        title=known.title if known is not None else "",
        references=known.references if known is not None else (),
        source=f"a run on {report.world_size} ranks of {report.device}",
        versions=report.environment.get("packages") or {},
    )
