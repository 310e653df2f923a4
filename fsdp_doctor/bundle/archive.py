"""The bundle as a zip file. Everything in it has gone through the redactor here, and nowhere else."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import zipfile
from collections import Counter
from dataclasses import dataclass

from fsdp_doctor.bundle import contents, issue
from fsdp_doctor.bundle.chosen_case import choose
from fsdp_doctor.bundle.contents import Gathered
from fsdp_doctor.bundle.issue_head import Head, head_of
from fsdp_doctor.bundle.private_kinds import PLACEHOLDER, PrivateKind
from fsdp_doctor.bundle.redaction import Redactor
from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.report.document import Report, report_from_dict, report_to_dict
from fsdp_doctor.report.whole_file import replace_file

_REPLACED = "replaced.txt"
_REPORT = "report.json"
# The same evidence makes the same file.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """files: text by name, issue.md first. replaced: how often each kind of private text was replaced in them."""

    files: dict[str, str]
    replaced: Counter[PrivateKind]


def bundle_of(evidence: Gathered, redactor: Redactor | None = None) -> Bundle:
    """The bundle, with everything private replaced. redactor: by default one that knows this machine's names."""
    redactor = redactor or Redactor.of_this_machine()
    raw = contents.texts(evidence)
    for text in raw.values():
        redactor.learn(text)
    if evidence.report is not None:
        evidence = dataclasses.replace(evidence, report=_without_private(evidence.report, redactor))
    # Of the clean report, so that what was private in it is not even in the pattern of a script.
    chosen = choose(evidence.found, evidence.checked, evidence.report)
    head = head_of(evidence, chosen)
    redactor.learn(head.text)
    clean_head = Head(**{name: redactor.clean(text) for name, text in dataclasses.asdict(head).items()})
    raw |= contents.case_texts(chosen) if chosen is not None else {}
    files = {name: redactor.clean(text) for name, text in raw.items()}
    if evidence.report is not None:
        files[_REPORT] = json.dumps(report_to_dict(evidence.report), indent=1) + "\n"
    files[_REPLACED] = _replaced_text(redactor.counts)
    return Bundle(
        files={"issue.md": issue.render(clean_head, files, redactor.counts), **files}, replaced=redactor.counts
    )


def _without_private(report: Report, redactor: Redactor) -> Report:
    values = json.loads(json.dumps(report_to_dict(report)))
    # Of `probe --host-name`: a name that nothing beside it shows to be one.
    redactor.learn_host(report.environment.get("host", ""))
    redactor.learn_values(values)
    return report_from_dict(redactor.clean_values(values))


def write_bundle(path: pathlib.Path, bundle: Bundle) -> None:
    """Writes the zip file. Raises DoctorFault where the disk does not take it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in bundle.files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            archive.writestr(entry, text.encode("utf-8", errors="replace"), zipfile.ZIP_DEFLATED)
    try:
        replace_file(path, content.getvalue())
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None


def _replaced_text(counts: Counter[PrivateKind]) -> str:
    lines = [f"{count:6}  {kind} ({PLACEHOLDER[kind]}_1, ...)" for kind, count in counts.most_common()]
    heading = "What was replaced, and how often; the same text has the same placeholder in every file."
    return "\n".join([heading, "", *(lines or ["nothing"])]) + "\n"
