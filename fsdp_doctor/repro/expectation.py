"""The outcome that a script must reproduce: the verdict in a report, or the catalogue's entry for the case."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import catalogue, signatures
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.axes import Sharding
from fsdp_doctor.matrix.cases import AnyCase, Case
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.methods import find_method
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import NOT_RUN, VerdictKind

_ONLY_HERE = "no script can be written, because only fsdp-doctor can see"
# Findings that a script cannot make.
_UNSEEN = re.compile(
    r"the extraction changed \d+ of \d+ parts of the training state|requires_grad is \w+ where it was \w+"
    r"|the next training step ends otherwise than that of a run which had this state from the start"
)
_DEVICE = re.compile(r"\b(?:cuda|npu|xpu|hpu|emulated)\b(?::\d+)?")
# Matches the list at the end of some of torch's messages, which depends on the model and the ranks.
_LIST = re.compile(r": \[\(.*$", re.DOTALL)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# The message of a CheckpointException contains the traceback of another exception. Its summary has only this exception.
_CARRIES, _CARRIER = "Traceback (most recent call last):", "CheckpointException: "
_DIRECTORY, _ANY_RANK = re.compile(r"the checkpoint/(?:\w+/)*"), re.compile(r"rank_\d+")
_HOLDS = re.compile(r"the optimizer holds \d+ of the model's \d+ parameters")
_NAMED = re.compile(r"^[^:;]+: (?P<names>[\w.]+(?:, [\w.]+)*)(?: and (?P<more>\d+) more)?$")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The expected outcome of a script.

    kind: the expected verdict.
    message: a regular expression for the exception's ``Type: message``, or for the script's own sentence about values;
        empty for any.
    by_every_rank: whether an exception on every rank, which can be a refusal, counts as a crash.
    title: the failure in words.
    references: the references of the catalogue's entry.
    source: a text about the origin of the expectation.
    versions: maps packages to the versions for which the outcome is expected.
    on_one_rank: whether the failure also shows on one rank.
    on_cpu: whether the failure also shows on the CPU.
    """

    kind: VerdictKind
    message: str = ""
    by_every_rank: bool = False
    title: str = ""
    references: tuple[str, ...] = ()
    source: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    on_one_rank: bool = False
    on_cpu: bool = True


def find_expected(case: AnyCase) -> Expectation:
    """Returns the outcome that the catalogue expects of the case with the installed torch, if torch is installed.

    Raises UsageError for a failure that a script cannot detect.
    """
    of_framework = case.scenario.matrix.distributions if isinstance(case, FrameworkCase) else ()
    versions = read_installed_versions(dict.fromkeys(("torch", "transformers", "peft", *of_framework)))
    source = "its catalogue"
    context = RunContext(torch=versions.get("torch", ""), packages=versions)
    entry = next(iter(catalogue.list_expected_failures(case, context)), None)
    if entry is None:
        return Expectation(kind="ok", title="Nothing is known to break here", source=source, versions=versions)
    _check_that_a_script_sees(case, entry.verdict)
    return Expectation(
        kind=entry.verdict,
        # A failure that can also show without an exception is recognized by its verdict alone.
        message=entry.signatures[0].pattern if entry.signatures and not entry.symptoms else "",
        by_every_rank=True,
        title=entry.title,
        references=entry.references,
        source=source,
        versions=versions,
        on_one_rank=entry.is_expected_in(case, dataclasses.replace(context, world_size=1)),
        on_cpu=entry.is_expected_in(case, dataclasses.replace(context, device="cpu")),
    )


def read_reported(case: AnyCase, report: Report) -> Expectation:
    """Returns the outcome of the case in a report.

    Raises UsageError for a case that did not run, and for a failure that a script cannot detect.
    """
    result = next((result for result in report.results if result.id == case.id), None)
    if result is None:
        raise UsageError(f"the report has no case {case.id!r}")
    verdict = result.verdict
    if verdict.kind in NOT_RUN:
        raise UsageError(f"case {case.id!r} is {verdict.kind} in the report: {verdict.reason}")
    if unseen := _UNSEEN.search(verdict.reason):
        raise UsageError(f"case {case.id!r}: {_ONLY_HERE} that {unseen[0]}")
    replicates = isinstance(case, Case) and case.scenario.sharding is Sharding.HSDP
    if report.world_size != 2 and not replicates:
        raise UsageError(f"the report is of {report.world_size} ranks; a script starts 2, or 4 where it replicates")
    _check_that_a_script_sees(case, verdict.kind)
    known = next((entry for entry in catalogue.read_catalogue() if entry.id == result.known), None)
    return Expectation(
        kind=verdict.kind,
        message=_make_pattern(result, case) if isinstance(case, Case) else "",
        by_every_rank=len(verdict.ranks) == report.world_size,
        title=known.title if known is not None else "",
        references=known.references if known is not None else (),
        source=f"a run on {report.world_size} ranks of {report.device}",
        versions=report.packages,
    )


def _check_that_a_script_sees(case: AnyCase, kind: VerdictKind) -> None:
    """Raises UsageError for a failure that a script cannot detect.

    A script cannot check the values of an extracted optimizer state. After a training step that raised, a script cannot
    check how a load affects the next step.
    """
    goes_wrong_later = isinstance(case, Case) and case.scenario.phase.raised and kind in ("poisoned", "misplaced")
    if isinstance(case, Case) and goes_wrong_later and _find_contract(case).direction == "in":
        raise UsageError(f"case {case.id!r}: {_ONLY_HERE} the effect of the load on the next step")
    if isinstance(case, Case) and kind == "wrong" and _find_contract(case).form == "optimizer":
        raise UsageError(f"case {case.id!r}: {_ONLY_HERE} that the optimizer's state has other values")


def _find_contract(case: Case) -> Contract:
    return find_method(case.method, case.scenario.version).contract


def _make_pattern(result: CaseResult, case: Case) -> str:
    """Makes a regular expression for the message that the script shows; empty if only the verdict can be compared."""
    match result.verdict.kind:
        case "refused":
            # The pattern accepts the file of any rank in any directory.
            if _find_contract(case).ranks == "rank0":
                # The other ranks, which are given nothing, refuse with another message.
                return _escape(result.verdict.reason.partition(" ")[0])
            return _ANY_RANK.sub(r"rank_\\d+", _DIRECTORY.sub(".*/", _generalize(result.verdict.reason)))
        case "crash" | "poisoned" | "oom":
            holds = _HOLDS.search(result.verdict.reason)
            return _make_exception_pattern(result) or (_escape(holds[0]) if holds else "")
        case "wrong" | "misplaced" | "incomplete":
            return _make_entries_pattern(result, case)
        case _:
            return ""


def _make_exception_pattern(result: CaseResult) -> str:
    failure = result.failure
    # The doctor raises FloatingPointError itself, for a loss that is nan.
    if failure is None or failure.type == "FloatingPointError":
        return ""
    return _generalize(failure.summary if _CARRIES in failure.message else f"{failure.type}: {failure.message}")


def _make_entries_pattern(result: CaseResult, case: Case) -> str:
    """Makes a pattern for the number of bad entries and the first few names; empty if a script would list other
    entries.
    """
    contract, names_match = _find_contract(case), _NAMED.search(result.verdict.reason)
    # For FSDP1, a script compares flat parameters, but a report compares the tensors in them.
    if names_match is None or (contract.direction == "in" and case.scenario.version == 1):
        return ""
    names = names_match["names"].split(", ")
    # A report counts weights and moments separately, so its count is left out if both are loaded.
    count = f"{len(names) + int(names_match['more'] or 0)} " if contract.loads != "both" else ""
    return _escape(f"{count}entries: {', '.join(names)}")


def _generalize(text: str) -> str:
    """Makes a pattern that matches the text of an exception on any device and with any addresses."""
    pieces = (_escape(piece) for piece in _DEVICE.split(_LIST.sub("", signatures.join_lines(text))))
    pattern = _ADDRESS.sub("0x[0-9a-f]+", signatures.DEVICE.join(pieces))
    return pattern.replace(_CARRIER, f"{_CARRIER}.*", 1) if pattern.startswith(_CARRIER) else pattern


def _escape(text: str) -> str:
    return re.escape(text).replace(r"\ ", " ")
