"""issue.md: what a maintainer needs, within what a GitHub issue takes, the answer to the first questions on top."""

from __future__ import annotations

import pathlib
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

from fsdp_doctor.bundle.chosen_case import SCRIPT, ChosenCase
from fsdp_doctor.bundle.contents import Gathered
from fsdp_doctor.bundle.private_text import PrivateKind
from fsdp_doctor.explain.text import telling_frames

MOST_CHARACTERS = 65_536
_VERSIONS = ("fsdp-doctor", "torch", "transformers", "accelerate", "peft")
_LONGEST_LINE = 300
# Characters of each part; together they leave room for the head and the words between.
_MOST: dict[str, int] = {
    "explain.txt": 9_000,
    "stacks.txt": 12_000,
    "log.txt": 12_000,
    "check.txt": 7_000,
    "command.txt": 1_500,
    "case.txt": 1_500,
    SCRIPT: 12_000,
    "environment.txt": 3_000,
}
_LEFT_OUT = "[... the rest is in the bundle ...]"


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


def render(head: Head, files: Mapping[str, str], replaced: Counter[PrivateKind]) -> str:
    """The issue. head, files: with everything private replaced already. replaced: how often, by kind."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fenced": _fenced, "code": _code}
    shown = {name: _cut(files[name], most) for name, most in _MOST.items() if name in files}
    text = environment.get_template("issue.md.jinja").render(
        head=head, shown=shown, files=sorted(files), replaced=replaced.most_common(), script=SCRIPT
    )
    return text[:MOST_CHARACTERS]


def _title(evidence: Gathered, chosen: ChosenCase | None) -> str:
    found = evidence.found
    if found is not None and found.entry is not None:
        return found.entry.title
    if found is not None and found.cause is not None:
        return found.cause.first.text.splitlines()[0] if found.cause.first.text else "A failure without a message"
    if evidence.run is not None:
        return evidence.run.sentence
    if chosen is not None and chosen.result is not None:
        return f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}"
    return f"{chosen.case.id} is known to fail" if chosen is not None else "No failure was found"


def _what(evidence: Gathered, chosen: ChosenCase | None) -> str:
    parts = [evidence.run.sentence] if evidence.run is not None else []
    found = evidence.found
    if found is not None and found.cause is not None:
        parts.append(" ".join(found.cause.first.text.split()))
    if found is not None and found.matches:
        parts.append(f"({found.matches[0].grade}: {found.matches[0].entry.id})")
    elif found is not None and found.cause is not None:
        parts.append("(not in the catalogue of known failures)")
    if not parts and chosen is not None and chosen.result is not None:
        parts.append(f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}")
    return " ".join(parts) or "nothing failed in what was given"


def _where(evidence: Gathered, chosen: ChosenCase | None) -> str:
    parts = []
    run, found = evidence.run, evidence.found
    if run is not None:
        parts += [f"{stack.name}: {stack.place}" for stack in run.stacks]
    if found is not None and found.cause is not None:
        parts += [*sorted(found.cause.sources - {""})[:8], *telling_frames(found.cause.first)]
    if chosen is not None:
        parts.append(f"case {chosen.case.id}")
    if evidence.report is not None:
        parts.append(f"{evidence.report.world_size} ranks of {evidence.report.device}")
    return "; ".join(parts) or "not known"


def _versions(evidence: Gathered) -> str:
    facts = evidence.report.environment if evidence.report is not None else evidence.facts
    packages = facts.get("packages", {})
    parts = [f"{name} {packages[name]}" for name in _VERSIONS if name in packages]
    parts += [f"Python {facts['python']}"] if "python" in facts else []
    parts += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    parts += [f"{count} x {name}" for name, count in Counter(facts.get("accelerators", [])).items()]
    return ", ".join(parts) + (" (of the report)" if evidence.report is not None else "")


def _reproduce(evidence: Gathered, chosen: ChosenCase | None) -> str:
    if chosen is None:
        how = shlex.join(evidence.run.command) if evidence.run is not None else "see the log below"
        return f"{how} (no case of the matrix is known for it)"
    return "; or ".join(filter(None, (chosen.script_command and f"{chosen.script_command} (below)", chosen.command)))


def _line(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _LONGEST_LINE else f"{one[:_LONGEST_LINE]} ..."


def _cut(text: str, most: int) -> str:
    """Its beginning and its end, by whole lines, where it is too long."""
    if len(text) <= most:
        return text.rstrip("\n")
    begin = text[: most // 2].rpartition("\n")[0]
    end = text[-(most // 2) :].partition("\n")[2]
    return f"{begin}\n{_LEFT_OUT}\n{end}".rstrip("\n")


def _fenced(text: str, language: str = "") -> str:
    """A block of code whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _code(text: str) -> str:
    """The same within a line."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"
