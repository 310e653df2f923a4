"""The JSON schema of a report, made from the types that a report is written from.

Names, types and closed sets of values come from the dataclasses and literals, descriptions from their docstrings, in
which a field is told as ``name: what it is``. ``python -m fsdp_doctor.report.schema`` writes ``schema.json``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import AnyScenario, Case, Scenario
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkScenario
from fsdp_doctor.report.document import NOT_IN_OLDER_REPORTS, SCHEMA, SCHEMA_VERSION, AppliedShim, CaseResult, Report
from fsdp_doctor.verdict.classification import MEANING, Verdict, VerdictKind
from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Ready, Record, Refused, Stage

FILE = pathlib.Path(__file__).with_suffix(".json")

_Schema = dict[str, Any]

# What is described once, under a name of its own.
_DEFINITIONS: dict[Any, str] = {
    VerdictKind: "verdict_kind",
    Stage: "stage",
    EnvironmentFacts: "environment",
    CaseResult: "result",
    Scenario: "scenario",
    FrameworkScenario: "framework_scenario",
    AppliedShim: "shim",
    Verdict: "verdict",
    RankReport: "rank",
    Record: "record",
    Failure: "failure",
    Problem: "problem",
    Refused: "refused",
    Ready: "ready",
}
# Every whole number of a report counts something, or is a rank or an exit code.
_PLAIN: dict[Any, _Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    type(None): {"type": "null"},
}


def schema() -> _Schema:
    """The schema, of the version that :func:`fsdp_doctor.report.document.report_to_dict` writes."""
    head = {"schema": {"const": SCHEMA}, "schema_version": {"const": SCHEMA_VERSION}}
    report = _object(Report)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"The JSON report of fsdp-doctor, schema version {SCHEMA_VERSION}",
        **report,
        "properties": head | report["properties"],
        "required": [*head, *report["required"]],
        "$defs": {name: _definition(kind) for kind, name in _DEFINITIONS.items()},
    }


def text() -> str:
    """What ``schema.json`` holds."""
    return json.dumps(schema(), indent=2) + "\n"


def _definition(kind: Any) -> _Schema:
    if kind is VerdictKind:
        return _literal(kind) | {"description": "\n".join(f"{word}: {what}" for word, what in MEANING.items())}
    if get_origin(kind) is Literal:
        return _literal(kind)
    return _result() if kind is CaseResult else _object(kind)


def _result() -> _Schema:
    """A result stands in the report with its case taken apart."""
    case, result = _object(Case, without=("scenario",)), _object(CaseResult, without=("case",))
    identity = {"id": _PLAIN[str] | {"description": "of the case"}, "scenario": _schema_of(AnyScenario)}
    properties = identity | case["properties"] | result["properties"]
    return result | {
        "properties": properties,
        "required": _always_there(properties),
    }


def _object(kind: Any, without: tuple[str, ...] = ()) -> _Schema:
    """A dataclass, all of whose fields are written; or a typed dictionary, with those that are there."""
    hints = get_type_hints(kind)
    about, meanings = _described(kind.__doc__ or "", hints)
    return {
        "description": about,
        "type": "object",
        "properties": {
            name: _schema_of(hint) | ({"description": meanings[name]} if name in meanings else {})
            for name, hint in hints.items()
            if name not in without
        },
        "required": [] if is_typeddict(kind) else _always_there(field.name for field in dataclasses.fields(kind)),
        "additionalProperties": False,
    }


def _always_there(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in NOT_IN_OLDER_REPORTS]


def _schema_of(hint: Any) -> _Schema:
    if hint in _DEFINITIONS:
        return {"$ref": f"#/$defs/{_DEFINITIONS[hint]}"}
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(argument) for argument in arguments]}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    raise TypeError(f"a report has no {hint}")


def _literal(hint: Any) -> _Schema:
    return {"enum": list(get_args(hint))}


def _described(docstring: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the whole, and of each field: ``name: text`` on a line or after a full stop."""
    one = "(?:" + "|".join(names) + ")"
    about, *rest = re.split(rf"(?:\n\s*|\.\s+)({one}(?:, {one})*): ", docstring.replace("``", ""))
    meanings = {
        name: _prose(meaning)
        for spoken_of, meaning in zip(rest[::2], rest[1::2], strict=True)
        for name in spoken_of.split(", ")
    }
    return _prose(about), meanings


def _prose(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
