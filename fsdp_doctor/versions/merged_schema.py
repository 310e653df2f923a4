"""The JSON schema of a merged report.

``python -m fsdp_doctor.versions.merged_schema`` writes ``merged_schema.json``.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from fsdp_doctor.report.schema import verdict_kinds
from fsdp_doctor.report.type_schemas import DRAFT, JsonSchema, TypeSchemas
from fsdp_doctor.verdict.classification import VerdictKind
from fsdp_doctor.versions.merged import (
    MERGED_SCHEMA,
    MERGED_SCHEMA_VERSION,
    Environment,
    MergedCase,
    MergedReport,
    Outcome,
    Period,
    Statement,
)

MERGED_SCHEMA_FILE = pathlib.Path(__file__).with_suffix(".json")

_DEFINITIONS: dict[Any, str] = {
    VerdictKind: "verdict_kind",
    Environment: "environment",
    Outcome: "outcome",
    Period: "period",
    Statement: "statement",
    MergedCase: "case",
}
_TYPES = TypeSchemas(definitions=_DEFINITIONS)


def merged_schema() -> JsonSchema:
    """The schema, of the version that :func:`fsdp_doctor.versions.merged_file.merged_to_dict` writes."""
    head = {"schema": {"const": MERGED_SCHEMA}, "schema_version": {"enum": list(range(1, MERGED_SCHEMA_VERSION + 1))}}
    merged = _TYPES.of_object(MergedReport)
    types = {name: _TYPES.of_object(kind) for kind, name in _DEFINITIONS.items() if kind is not VerdictKind}
    return {
        "$schema": DRAFT,
        "title": f"The merged report of fsdp-doctor, schema version {MERGED_SCHEMA_VERSION}",
        **merged,
        "properties": head | merged["properties"],
        "required": [*head, *merged["required"]],
        "$defs": {"verdict_kind": verdict_kinds(), **types},
    }


def merged_schema_text() -> str:
    """What ``merged_schema.json`` holds."""
    return json.dumps(merged_schema(), indent=2) + "\n"


if __name__ == "__main__":
    MERGED_SCHEMA_FILE.write_text(merged_schema_text(), encoding="utf-8")
