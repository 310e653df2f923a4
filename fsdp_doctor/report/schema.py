"""Makes the JSON schemas of the documents. ``python -m fsdp_doctor.report.schema`` prints the schema of a report."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Collection
from typing import Any

import msgspec

from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.report.document import SCHEMA, SCHEMA_VERSION, Report
from fsdp_doctor.verdict.classification import MEANING


def make_report_schema() -> dict[str, Any]:
    """Makes the schema of a report."""
    made = make_document_schema(Report, SCHEMA, SCHEMA_VERSION, "The JSON report of fsdp-doctor")
    made["$defs"]["CaseResult"]["properties"]["scenario"] = {
        "anyOf": [
            _make_strict_object({axis.name: {"enum": list(axis.values)} for axis in AXES}),
            _make_strict_object({"framework": {"type": "string"}, "configuration": {"type": "string"}}),
        ]
    }
    return made


def make_document_schema(kind: type, name: str, version: int, title: str) -> dict[str, Any]:
    """Makes the schema of a document, in which every key is required and no other key is allowed."""
    definitions = msgspec.json.schema(kind)["$defs"]
    for definition in definitions.values():
        # All keys of EnvironmentFacts are optional, because only known facts are stored.
        optional = definition["properties"] if definition["title"] == "EnvironmentFacts" else ()
        definition |= _make_strict_object(definition["properties"], optional)
        definition["description"] = inspect.cleandoc(definition.get("description", ""))
        for value in definition["properties"].values():
            value.pop("default", None)
            _forbid_negative(value)
    document = definitions.pop(kind.__name__)
    head = {"schema": {"const": name}, "schema_version": {"const": version}}
    verdicts = "\n".join(f"{verdict}: {meaning}" for verdict, meaning in MEANING.items())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **document,
        "title": f"{title}, schema version {version}",
        "description": f"{document['description']}\n\nThe kinds of verdict:\n{verdicts}",
        "properties": head | document["properties"],
        "required": [*head, *document["required"]],
        "$defs": definitions,
    }


def _make_strict_object(properties: dict[str, Any], optional: Collection[str] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _forbid_negative(value: Any) -> None:
    """Forbids negative integers, because every integer in a document is a count, an index, a rank or an exit code."""
    if isinstance(value, list):
        for each in value:
            _forbid_negative(each)
    elif isinstance(value, dict):
        if value.get("type") == "integer":
            value["minimum"] = 0
        for each in value.values():
            _forbid_negative(each)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(make_report_schema(), indent=2) + "\n")
