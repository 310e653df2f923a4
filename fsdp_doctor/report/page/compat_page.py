"""Renders a merged report as one HTML file: the template with the data, and the style and scripts of this directory.

``cases.js`` reads the data. The data contain every text once, in a list; rows refer to a text by its index in the list:

- ``environments`` are the columns. ``axes``, ``methods``, ``kinds`` and ``texts`` are lists of texts.
- ``outcomes`` are rows of (verdict, reason, message, further findings, entry): an index into ``kinds``, then indices
  into ``texts``.
- ``cases`` are rows of (strategy, offload, staging, other axes, direction, method, outcome of each environment,
  statements, whether the case changed). The strategy, offload, staging and direction are indices into the lists in
  ``axes``, the method into ``methods``, the outcomes into ``outcomes`` (-1 for no result), and the other axes and the
  statements into ``texts``.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import pathlib
import re
from typing import Any, get_args

import jinja2
from markupsafe import Markup
from packaging.version import Version

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.known.failures import DOCUMENTATION
from fsdp_doctor.known.signatures import DEVICE
from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.report.journal import replace_file, turn_write_errors
from fsdp_doctor.report.versions.merged import (
    NO_ANSWER,
    NOWHERE,
    SHORTENED,
    Environment,
    MergedCase,
    MergedReport,
    MergedVerdict,
    Outcome,
)
from fsdp_doctor.report.versions.merging import make_version_key, strip_build
from fsdp_doctor.verdict.classification import GOOD, MEANING, VerdictKind

# The files are joined in this order into one script.
_SCRIPTS = ("cases.js", "choice.js", "matrix.js", "cell.js", "search.js", "start.js")
_ROOM = pathlib.Path(__file__).parent
# Everything is escaped, because reports quote the output of programs.
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_ROOM),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
_NO_RESULT = -1
_KINDS: tuple[MergedVerdict, ...] = (*get_args(VerdictKind), "unmeasurable")
_UNMEASURABLE = "ran on the CPU, where an offload moves nothing: it cannot show a failure there"
_DIRECTIONS = get_args(Direction)
_AXES = ("strategy", "offload", "staging")


def write_page(path: pathlib.Path, merged: MergedReport, picture: str = "") -> None:
    """Writes the page to ``path``. Raises UsageError if there is no result to show, DoctorFault if writing fails."""
    text = render_page(merged, picture)
    with turn_write_errors(path):
        replace_file(path, text.encode(errors="replace"))


def render_page(merged: MergedReport, picture: str = "") -> str:
    """Renders the page. Raises UsageError if there is no result to show.

    picture: the ledgers as SVG; empty without ledgers.
    """
    if not merged.cases:
        raise UsageError("the reports have no results, so there is nothing to show on a page")
    merged = put_newest_first(merged)
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS))
    return _TEMPLATES.get_template("page.html.jinja").render(
        environments=merged.environments,
        num_cases=len(merged.cases),
        data=make_page_data(merged),
        entries=read_catalogue(),
        meanings={**MEANING, "unmeasurable": _UNMEASURABLE},
        words={axis: _list_meanings(merged, axis) for axis in _AXES},
        documentation=DOCUMENTATION,
        # Style and script are not escaped. The content security policy allows no others.
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        picture=base64.b64encode(picture.encode()).decode(),
    )


def _read(name: str) -> str:
    return (_ROOM / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the hash by which a content security policy allows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class _Numbers:
    """A list of distinct texts, each with its number."""

    def __init__(self, *first: str) -> None:
        self._number = {text: number for number, text in enumerate(first)}

    def find_number(self, text: str) -> int:
        return self._number.setdefault(text, len(self._number))

    @property
    def texts(self) -> list[str]:
        return list(self._number)


def put_newest_first(merged: MergedReport) -> MergedReport:
    """Sorts the environments by version of torch, the newest first. Environments that could not be made stay last."""

    def key(index: int) -> tuple[bool, tuple[bool, Version]]:
        environment = merged.environments[index]
        return environment.world_size > 0, make_version_key(strip_build(environment.torch))

    order = sorted(range(len(merged.environments)), key=key, reverse=True)
    return dataclasses.replace(
        merged,
        environments=tuple(merged.environments[index] for index in order),
        cases=tuple(
            dataclasses.replace(case, outcomes=tuple(case.outcomes[index] for index in order)) for case in merged.cases
        ),
    )


def _list_meanings(merged: MergedReport, axis: str) -> dict[str, str]:
    """Maps each value of an axis that some case has to its meaning."""
    used = {getattr(case, axis) for case in merged.cases}
    return {value: meaning for value, meaning in AXIS[axis].values.items() if value in used}


def make_page_data(merged: MergedReport) -> dict[str, Any]:
    """Makes the data of the page, as JSON values."""
    texts, methods = _Numbers(""), _Numbers()
    words = {axis: _Numbers(*_list_meanings(merged, axis)) for axis in _AXES}
    cases = [_make_case(case, words, methods, texts) for case in merged.cases]
    return {
        "environments": [_make_column(environment) for environment in merged.environments],
        "kinds": [*_KINDS],
        "good": [kind for kind in _KINDS if kind in GOOD],
        "bad": [kind for kind in _KINDS if kind not in GOOD | NO_ANSWER],
        "axes": {axis: numbers.texts for axis, numbers in words.items()} | {"direction": [*_DIRECTIONS]},
        "methods": methods.texts,
        "outcomes": [_make_outcome(outcome, texts) for outcome in merged.outcomes],
        "cases": cases,
        # ``<device>`` stands for any device's name, as in the catalogue's files.
        "signatures": {
            entry.id: [pattern.pattern.replace(DEVICE, "<device>") for pattern in entry.signatures]
            for entry in read_catalogue()
            if entry.signatures
        },
        "device": DEVICE,
        "nowhere": NOWHERE,
        "texts": texts.texts,
    }


def _make_column(environment: Environment) -> dict[str, str]:
    """Makes the head of a column.

    torch: the version of torch.
    more: the facts that distinguish the column from others with the same torch and device; mostly empty.
    anchor: the column's name in a link.
    incomplete: the reason why some cases of the column did not run; empty if all ran.
    """
    version = re.sub(r"^torch (\S+), .*|.*", r"\1", environment.name, flags=re.DOTALL)
    device = environment.device if environment.world_size else NOWHERE
    packages = {**environment.packages, "Python": environment.python or "unknown"}
    return {
        "name": environment.name,
        "torch": version or "?",
        "more": environment.name.removeprefix(f"torch {version}, {device}").strip(", "),
        "device": device,
        "anchor": re.sub(r"[^\w.]+", "-", environment.name).strip("-"),
        "options": environment.rerun_options,
        "packages": ", ".join(f"{name} {package}" for name, package in packages.items()),
        "incomplete": environment.ended if not environment.complete else "",
    }


def _make_case(case: MergedCase, words: dict[str, _Numbers], methods: _Numbers, texts: _Numbers) -> list[Any]:
    begin = "".join(f"{word}/" for word in (case.strategy, case.offload, case.staging) if word)
    others = case.id.removeprefix(begin).removesuffix(case.method).strip("/")
    return [
        *(words[axis].find_number(getattr(case, axis)) for axis in _AXES),
        texts.find_number(others),
        _DIRECTIONS.index(case.direction),
        methods.find_number(case.method),
        [_NO_RESULT if index is None else index for index in case.outcomes],
        [texts.find_number(f"{statement.where}: {statement.text}") for statement in case.statements],
        int(case.changes),
    ]


def _make_outcome(outcome: Outcome, texts: _Numbers) -> list[Any]:
    raised = " ".join(outcome.message.removesuffix(SHORTENED).split())
    message = "" if raised in " ".join(outcome.reason.split()) else outcome.message
    also = "\n".join(outcome.also)
    return [_KINDS.index(outcome.kind), *map(texts.find_number, (outcome.reason, message, also, outcome.known))]
