"""The published JSON schema: it is what the types say, it describes them, and the reports that there are keep to it."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import pathlib
from typing import Any

import jsonschema
import pytest
from program import ROOT

from fsdp_doctor.report import schema
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.type_schemas import TypeSchemas
from fsdp_doctor.verdict.classification import MEANING
from fsdp_doctor.verdict.records import RankReport

_REPORTS = sorted((ROOT / "examples" / "reports").rglob("*.json*"))


@functools.cache
def _published() -> Any:
    return json.loads(schema.FILE.read_text(encoding="utf-8"))


def test_the_published_schema_is_the_one_that_the_types_give() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), "run: python -m fsdp_doctor.report.schema"


@pytest.mark.parametrize("file", _REPORTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_committed_report_keeps_to_the_schema(file: pathlib.Path) -> None:
    content = file.read_bytes()
    data = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    # A few of thousands of results are as good as all, and all cost minutes.
    data["results"] = [*data["results"][::40], *[one for one in data["results"] if one["ranks"]][::20]]
    assert data["results"]
    jsonschema.validate(data, _published(), cls=jsonschema.Draft202012Validator)


def test_every_type_is_described_and_so_is_every_field_that_its_docstring_tells_of() -> None:
    definitions = _published()["$defs"]
    for name, definition in definitions.items():
        assert definition.get("description") or name == "stage", name
    assert definitions["result"]["description"].startswith("One case: its verdict")
    assert definitions["result"]["properties"]["seconds"]["description"] == "the slowest rank's time inside the path"
    assert definitions["result"]["properties"]["peak_extra_bytes"]["description"] == "the largest rank's"
    assert definitions["failure"]["properties"]["time"]["description"].startswith("seconds since the epoch")
    assert definitions["environment"]["properties"]["hip"] == definitions["environment"]["properties"]["cuda"]
    assert _published()["properties"]["ended"]["description"] == "what ended an incomplete run"
    for kind, meaning in MEANING.items():
        assert f"{kind}: {meaning}" in definitions["verdict_kind"]["description"]


def test_it_has_every_field_and_no_other() -> None:
    properties = _published()["properties"]
    assert list(properties) == ["schema", "schema_version", *(field.name for field in dataclasses.fields(Report))]
    rank = _published()["$defs"]["rank"]
    assert list(rank["properties"]) == rank["required"] == [field.name for field in dataclasses.fields(RankReport)]
    result = _published()["$defs"]["result"]
    assert set(result["properties"]) - set(result["required"]) == {"yielded", "known", "ledgers"}
    record = _published()["$defs"]["record"]
    assert set(record["properties"]) - set(record["required"]) == {"call", "yielded", "retire", "refusal", "ledgers"}
    assert "device" not in _published()["$defs"]["environment"]["properties"]


def test_a_type_that_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(TypeError, match="JSON has no"):
        TypeSchemas(definitions={}).of_type(complex)
