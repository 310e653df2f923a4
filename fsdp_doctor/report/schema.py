"""The JSON schema of a report, made from the types that a report is written from.

``python -m fsdp_doctor.report.schema`` writes ``schema.json``.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Literal, get_origin

from fsdp_doctor.ledgers.ledger import DeviceLedger, HostLedger, StageLedger
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import AnyScenario, Case, Scenario
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkScenario
from fsdp_doctor.report.document import NOT_IN_OLDER_REPORTS, SCHEMA, SCHEMA_VERSION, AppliedShim, CaseResult, Report
from fsdp_doctor.report.type_schemas import DRAFT, PLAIN, JsonSchema, TypeSchemas, of_literal
from fsdp_doctor.verdict.classification import MEANING, Verdict, VerdictKind
from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Ready, Record, Refused, Stage

FILE = pathlib.Path(__file__).with_suffix(".json")

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
    StageLedger: "ledger",
    DeviceLedger: "device_ledger",
    HostLedger: "host_ledger",
}
_TYPES = TypeSchemas(definitions=_DEFINITIONS, optional=NOT_IN_OLDER_REPORTS)


def schema() -> JsonSchema:
    """The schema, of the version that :func:`fsdp_doctor.report.document.report_to_dict` writes."""
    head = {"schema": {"const": SCHEMA}, "schema_version": {"enum": list(range(1, SCHEMA_VERSION + 1))}}
    report = _TYPES.of_object(Report)
    return {
        "$schema": DRAFT,
        "title": f"The JSON report of fsdp-doctor, schema version {SCHEMA_VERSION}",
        **report,
        "properties": head | report["properties"],
        "required": [*head, *report["required"]],
        "$defs": {name: _definition(kind) for kind, name in _DEFINITIONS.items()},
    }


def text() -> str:
    """What ``schema.json`` holds."""
    return json.dumps(schema(), indent=2) + "\n"


def _definition(kind: Any) -> JsonSchema:
    if kind is VerdictKind:
        return verdict_kinds()
    if get_origin(kind) is Literal:
        return of_literal(kind)
    return _result() if kind is CaseResult else _TYPES.of_object(kind)


def verdict_kinds() -> JsonSchema:
    return of_literal(VerdictKind) | {"description": "\n".join(f"{word}: {what}" for word, what in MEANING.items())}


def _result() -> JsonSchema:
    """A result stands in the report with its case taken apart."""
    case, result = _TYPES.of_object(Case, without=("scenario",)), _TYPES.of_object(CaseResult, without=("case",))
    identity = {"id": PLAIN[str] | {"description": "of the case"}, "scenario": _TYPES.of_type(AnyScenario)}
    properties = identity | case["properties"] | result["properties"]
    return result | {
        "properties": properties,
        "required": _TYPES.always_there(properties),
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
