"""The first lines of issue.md: what happened, where, with which versions, and how to reproduce it."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass

from fsdp_doctor.bundle.chosen_case import ChosenCase
from fsdp_doctor.bundle.contents import Gathered
from fsdp_doctor.explain import Explanation
from fsdp_doctor.explain.text import telling_frames

_VERSIONS = ("fsdp-doctor", "torch", "transformers", "accelerate", "peft")
_LONGEST_LINE = 300
_MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first lines of an issue. title: of the issue. what, where, versions, reproduce: one line each, plain text."""

    title: str
    what: str
    where: str
    versions: str
    reproduce: str

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.what, self.where, self.versions, self.reproduce))


def head_of(evidence: Gathered, chosen: ChosenCase | None) -> Head:
    """Made of all that is known, whatever part of it there is."""
    return Head(
        title=_line(_title(evidence, chosen)),
        what=_line(_what(evidence, chosen)),
        where=_line(_where(evidence, chosen)),
        versions=_line(_versions(evidence)),
        reproduce=_line(_reproduce(evidence, chosen)),
    )


def _title(evidence: Gathered, chosen: ChosenCase | None) -> str:
    found = evidence.found
    if found is not None and found.entry is not None:
        return found.entry.title
    if said := _said(found):
        return said[0]
    if evidence.run is not None:
        return evidence.run.sentence
    if chosen is not None and chosen.result is not None:
        return f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}"
    return f"{chosen.case.id} is known to fail" if chosen is not None else "No failure was found"


def _what(evidence: Gathered, chosen: ChosenCase | None) -> str:
    parts = [evidence.run.sentence] if evidence.run is not None else []
    found = evidence.found
    parts += _said(found)
    if found is not None and found.matches:
        parts.append(f"({found.matches[0].grade}: {found.matches[0].entry.id})")
    elif found is not None and found.showing == "failure":
        parts.append("(not in the catalogue of known failures)")
    if not parts and chosen is not None and chosen.result is not None:
        parts.append(f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}")
    return " ".join(parts) or "nothing failed in what was given"


def _said(found: Explanation | None) -> list[str]:
    """What the logs show: the exception that is the cause; or where the ranks part, or which one torchrun saw fail."""
    if found is None:
        return []
    if found.hang is not None and found.showing == "hang":
        return list(found.hang.parting) or ["A collective did not end."]
    if found.summary is not None and found.showing in ("consequences", "nothing"):
        return [f"{found.summary.sentence}."]
    return [found.cause.first.text or "an exception without a message"] if found.cause is not None else []


def _where(evidence: Gathered, chosen: ChosenCase | None) -> str:
    run, found = evidence.run, evidence.found
    if run is not None and run.stacks:
        parts = [f"{stack.name}: {stack.place}" for stack in run.stacks]
    else:
        parts = _failed_ranks(evidence)[:_MOST_RANKS]
    if found is not None and found.cause is not None and found.showing == "failure":
        parts += telling_frames(found.cause.first)
    if chosen is not None:
        parts.append(f"case {chosen.case.id}")
    if evidence.report is not None:
        parts.append(f"{evidence.report.world_size} ranks of {evidence.report.device}")
    return "; ".join(dict.fromkeys(parts)) or "not known"


def _failed_ranks(evidence: Gathered) -> list[str]:
    """Those that raised what is the cause, or the one that torchrun saw fail first: it ends the others itself."""
    found = evidence.found
    if found is not None and found.cause is not None and found.showing == "failure" and found.cause.sources - {""}:
        return sorted(found.cause.sources - {""})
    if found is not None and found.summary is not None:
        return [f"rank {found.summary.rank}"]
    return [f"rank {rank}" for rank in evidence.run.rank_exit_codes] if evidence.run is not None else []


def _versions(evidence: Gathered) -> str:
    facts = evidence.report.environment if evidence.report is not None else evidence.facts
    packages = facts.get("packages", {})
    parts = [f"{name} {packages[name]}" for name in _VERSIONS if name in packages]
    parts += [f"Python {facts['python']}"] if "python" in facts else []
    parts += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    parts += [f"{count} x {name}" for name, count in Counter(facts.get("accelerators", [])).items()]
    return f"{', '.join(parts)}{_whose_versions(evidence)}"


def _whose_versions(evidence: Gathered) -> str:
    """A log does not say where it was written."""
    if evidence.report is not None:
        return " (of the report)"
    return "" if evidence.run is not None else " (where the bundle was made)"


def _reproduce(evidence: Gathered, chosen: ChosenCase | None) -> str:
    if chosen is None:
        how = shlex.join(evidence.run.command) if evidence.run is not None else "see the log below"
        return f"{how} (no case of the matrix is known for it)"
    return "; or ".join(filter(None, (chosen.script_command and f"{chosen.script_command} (below)", chosen.command)))


def _line(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _LONGEST_LINE else f"{one[:_LONGEST_LINE]} ..."
