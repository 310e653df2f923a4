"""Writes issue.md, and the zip file that contains it."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

from fsdp_doctor.bundle.evidence import (
    MINIMAL_SCRIPT,
    ChosenCase,
    FailureEvidence,
    choose_case,
    make_case_texts,
    make_texts,
)
from fsdp_doctor.bundle.named import NamedInLogs
from fsdp_doctor.bundle.redaction import PLACEHOLDER, Redactor
from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.explain import Explanation
from fsdp_doctor.explain.text import choose_frames
from fsdp_doctor.report.document import convert_report_to_dict, read_report_dict
from fsdp_doctor.report.journal import replace_file

_VERSIONS = ("fsdp-doctor", "torch", "transformers", "accelerate", "peft")
_LONGEST_LINE = 300
_MOST_RANKS = 8
MOST_CHARACTERS = 65_536
# The titles of the parts that are shown, and their maximal numbers of lines. With the head, the versions, a short
# script and the text in between, an issue has at most 150 lines. The limit of explain.txt leaves room for the longest
# explanation of a known failure with its remedy.
_TITLES = {
    "stacks.txt": "Where each rank was",
    "explain.txt": "What `fsdp-doctor explain` says",
    "check.txt": "What `fsdp-doctor check` says about the configuration",
}
_MOST: dict[str, int] = {"stacks.txt": 12, "explain.txt": 64, "check.txt": 24, "environment.txt": 15}
# Longer runs of backticks are shortened, because a fence must be longer than any run in its text.
_MANY_BACKTICKS = re.compile("`{17,}")
_LEFT_OUT = "[... the rest is in the bundle ...]"
_REPLACED = "replaced.txt"
_REPORT = "report.json"
# A fixed date, so that the same evidence makes the same file.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first lines of an issue.

    title: the title as plain text.
    what, where, versions, reproduce: one line of plain text for each of these points.
    """

    title: str
    what: str
    where: str
    versions: str
    reproduce: str

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.what, self.where, self.versions, self.reproduce))


def make_head(evidence: FailureEvidence, chosen: ChosenCase | None) -> Head:
    """Makes the first lines of the issue from the evidence."""
    return Head(
        title=_join_lines(_issue_title(evidence, chosen)),
        what=_join_lines(_describe_failure(evidence, chosen)),
        where=_join_lines(evidence.named.write_ranks(_describe_place(evidence, chosen))),
        versions=_join_lines(_describe_versions(evidence)),
        reproduce=_join_lines(_reproduce_line(evidence, chosen)),
    )


def _issue_title(evidence: FailureEvidence, chosen: ChosenCase | None) -> str:
    explanation = evidence.explanation
    if explanation is not None and explanation.entry is not None:
        return explanation.entry.title
    if sentences := _describe_cause(explanation):
        return sentences[0]
    if evidence.run is not None:
        return evidence.run.sentence
    if chosen is not None and chosen.result is not None:
        return f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}"
    return f"{chosen.case.id} is known to fail" if chosen is not None else "No failure was found"


def _describe_failure(evidence: FailureEvidence, chosen: ChosenCase | None) -> str:
    parts = [evidence.run.sentence] if evidence.run is not None else []
    explanation = evidence.explanation
    parts += _describe_cause(explanation)
    if explanation is not None and explanation.matches:
        parts.append(f"({explanation.matches[0].grade}: {explanation.matches[0].entry.id})")
    elif explanation is not None and explanation.showing == "failure":
        parts.append("(not in the catalogue of known failures)")
    if not parts and chosen is not None and chosen.result is not None:
        parts.append(f"{chosen.result.verdict.kind}: {chosen.result.verdict.reason}")
    return " ".join(parts) or "no failure in the given logs, configuration and report"


def _describe_cause(explanation: Explanation | None) -> list[str]:
    """Describes the cause: an exception, the place where hanging ranks begin to differ, or torchrun's failed rank."""
    if explanation is None:
        return []
    if explanation.hang is not None and explanation.showing == "hang":
        return list(explanation.hang.sentences) or ["A collective did not end."]
    if explanation.summary is not None and explanation.showing in ("consequences", "nothing"):
        return [f"{explanation.summary.sentence}."]
    return [explanation.cause.first.text or "an exception without a message"] if explanation.cause is not None else []


def _describe_place(evidence: FailureEvidence, chosen: ChosenCase | None) -> str:
    run, explanation = evidence.run, evidence.explanation
    if run is not None and run.stacks:
        parts = [f"{stack.name}: {stack.place}" for stack in run.stacks]
    else:
        parts = _list_failed_ranks(evidence)[:_MOST_RANKS]
    if explanation is not None and explanation.cause is not None and explanation.showing == "failure":
        parts += choose_frames(explanation.cause.first)
    if chosen is not None:
        parts.append(f"case {chosen.case.id}")
    if evidence.report is not None:
        parts.append(f"{evidence.report.world_size} ranks of {evidence.report.device}")
    return "; ".join(dict.fromkeys(parts)) or "not known"


def _list_failed_ranks(evidence: FailureEvidence) -> list[str]:
    """Lists the ranks that raised the cause; if the log shows no such rank, lists failed ranks that torchrun reports.

    If torchrun's summary is in a log, lists only the first failed rank, because torchrun itself ends the others.
    """
    explanation = evidence.explanation
    if explanation is not None:
        cause = explanation.cause if explanation.showing == "failure" else None
        if cause is not None and cause.sources - {""}:
            return sorted(cause.sources - {""})
        if explanation.summary is not None:
            return [f"rank {explanation.summary.rank}"]
    return [f"rank {rank}" for rank in evidence.run.rank_exit_codes] if evidence.run is not None else []


def _describe_versions(evidence: FailureEvidence) -> str:
    """Describes the versions of the packages with which the job failed.

    The versions come from the report, from this machine if it ran the job, or from the log.
    """
    explanation = evidence.explanation
    if evidence.report is None and evidence.run is None and explanation is not None:
        return _describe_versions_of_logs(evidence, explanation.torch)
    facts = evidence.report.environment if evidence.report is not None else evidence.environment
    packages = facts.get("packages", {})
    names = dict.fromkeys((*_VERSIONS, *evidence.named.versions))
    parts = [f"{name} {packages[name]}" for name in names if name in packages]
    parts += [f"Python {facts['python']}"] if "python" in facts else []
    parts += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    parts += [f"{count} x {name}" for name, count in Counter(facts.get("accelerators", [])).items()]
    return f"{', '.join(parts)}{' (of the report)' if evidence.report is not None else ''}"


def _describe_versions_of_logs(evidence: FailureEvidence, torch: str) -> str:
    versions = {"torch": torch} | {
        name: version for name, version in evidence.named.versions.items() if name != "torch"
    }
    named = [f"{name} {version}" for name, version in versions.items() if version]
    unknown = [name for name, version in versions.items() if not version]
    parts = [f"{', '.join(named)} (of the log)"] if named else []
    parts += [f"the log does not name its {', '.join(unknown)}"] if unknown else []
    return "; ".join(parts)


def _reproduce_line(evidence: FailureEvidence, chosen: ChosenCase | None) -> str:
    if chosen is None:
        how = shlex.join(evidence.run.command) if evidence.run is not None else "see the log in the bundle"
        return f"{how} (no case of the matrix is known for it)"
    where = "below" if chosen.minimal else "in the bundle"
    return "; or ".join(filter(None, (chosen.script_command and f"{chosen.script_command} ({where})", chosen.command)))


def _join_lines(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def render_issue(head: Head, files: Mapping[str, str], replaced: Counter[str], named: NamedInLogs) -> str:
    """Renders issue.md.

    head: the first lines of issue.md, without private text.
    files: the texts of the bundle's files by name, without private text.
    replaced: how often private text of each kind was replaced by a placeholder.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fenced": _fence, "code": _quote_as_code}
    shown = {name: _cut(files[name], most) for name, most in _MOST.items() if name in files}
    if "explain.txt" in shown:
        # Both texts have the same entry of the catalogue, so only one is shown.
        shown.pop("check.txt", None)
        shown["explain.txt"] = named.write_ranks(shown["explain.txt"])
    text = environment.get_template("issue.md.jinja").render(
        head=head,
        parts={title: shown[name] for name, title in _TITLES.items() if name in shown},
        script=files.get(MINIMAL_SCRIPT, "").rstrip(),
        environment=shown["environment.txt"],
        of_log_alone=_REPORT not in files and "command.txt" not in files,
        files=sorted(files),
        replaced=replaced.most_common(),
    )
    return text[:MOST_CHARACTERS]


def _cut(text: str, most: int) -> str:
    """Shortens a text to ``most`` lines by leaving out lines in the middle, and cuts off the ends of long lines."""
    lines = [line[:_LONGEST_LINE] for line in text.rstrip("\n").splitlines()]
    if len(lines) > most:
        first = most * 3 // 4
        lines = [*lines[:first], _LEFT_OUT, *lines[first + 1 - most :]]
    return "\n".join(lines)


def _fence(text: str, language: str = "") -> str:
    """Quotes a text as a block of code, with a fence longer than any run of backticks in it."""
    text = _MANY_BACKTICKS.sub("`" * 16, text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _quote_as_code(text: str) -> str:
    """Quotes a text as code within a line."""
    text = _MANY_BACKTICKS.sub("`" * 16, text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bug report.

    files: maps names to texts, issue.md first.
    replaced: how often each kind of private text was replaced.
    """

    files: dict[str, str]
    replaced: Counter[str]


def make_bundle(evidence: FailureEvidence, redactor: Redactor | None = None) -> Bundle:
    """Makes a bundle in which private text is replaced.

    redactor: the redactor to use; by default, a redactor that knows this machine's names.
    """
    redactor = redactor or Redactor.for_this_machine()
    raw = make_texts(evidence)
    for text in raw.values():
        redactor.learn(text)
    if evidence.report is not None:
        values = json.loads(json.dumps(convert_report_to_dict(evidence.report)))
        # `probe --host-name` adds the host's name to a report. No words around it reveal that it is a host's name.
        redactor.learn_host(evidence.report.environment.get("host", ""))
        redactor.learn_values(values)
        evidence = dataclasses.replace(evidence, report=read_report_dict(redactor.clean_values(values)))
    # The case is chosen from the cleaned report, so that the pattern of a script contains no private text.
    chosen = choose_case(evidence)
    head = make_head(evidence, chosen)
    redactor.learn(head.text)
    clean_head = Head(**{name: redactor.clean(text) for name, text in dataclasses.asdict(head).items()})
    raw |= make_case_texts(chosen) if chosen is not None else {}
    files = {name: redactor.clean(text) for name, text in raw.items()}
    if evidence.report is not None:
        files[_REPORT] = json.dumps(convert_report_to_dict(evidence.report), indent=1) + "\n"
    lines = [f"{count:6}  {kind} ({PLACEHOLDER[kind]}_1, ...)" for kind, count in redactor.counts.most_common()]
    heading = "Replaced texts and their numbers; the same text has the same placeholder in every file."
    files[_REPLACED] = "\n".join([heading, "", *(lines or ["nothing"])]) + "\n"
    return Bundle(
        files={"issue.md": render_issue(clean_head, files, redactor.counts, evidence.named), **files},
        replaced=redactor.counts,
    )


def write_bundle(path: pathlib.Path, bundle: Bundle) -> None:
    """Writes the zip file. Raises DoctorFault if the file cannot be written."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in bundle.files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            archive.writestr(entry, text.encode("utf-8", errors="replace"), zipfile.ZIP_DEFLATED)
    try:
        replace_file(path, content.getvalue())
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None
