"""The report as JSON: it is read back as it was, its schema is strict, and the committed reports keep to the schema."""

import copy
import dataclasses
import gzip
import json
from typing import get_args

import jsonschema
import pytest
from support.places import ROOT
from support.reports import SCHEMA, every_kind, everything, report

from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.report.document import Report, convert_report_to_dict, read_report_dict
from fsdp_doctor.report.formats import render
from fsdp_doctor.verdict.classification import MEANING
from fsdp_doctor.verdict.records import ProblemKind, RankReport, Stage, Stop

_REPORTS = sorted((ROOT / "examples" / "reports").rglob("*.json.gz"))
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def refused(data):
    return not _VALIDATOR.is_valid(data)


@pytest.mark.parametrize("made", [report(), report(*every_kind()), everything()], ids=["empty", "kinds", "everything"])
def test_a_report_survives_json_and_is_valid_by_the_schema(made):
    assert read_report_dict(convert_report_to_dict(made)) == made
    data = json.loads(render(made, "json"))
    assert read_report_dict(data) == made
    _VALIDATOR.validate(data)


@pytest.mark.parametrize("file", _REPORTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_committed_report_keeps_to_the_schema(file):
    data = json.loads(gzip.decompress(file.read_bytes()))
    # A few of thousands of results are as good as all, and all cost minutes.
    data["results"] = [*data["results"][::80], *[result for result in data["results"] if result["ranks"]][::40]]
    assert data["results"]
    _VALIDATOR.validate(data)


def test_the_schema_has_every_field_and_says_what_the_verdicts_mean():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]) == ["schema", "schema_version", *(f.name for f in dataclasses.fields(Report))]
    rank = SCHEMA["$defs"]["RankReport"]
    assert list(rank["properties"]) == rank["required"] == [field.name for field in dataclasses.fields(RankReport)]
    assert all(f"{kind}: {meaning}" in SCHEMA["description"] for kind, meaning in MEANING.items())
    assert all(definition["description"] for definition in SCHEMA["$defs"].values())


WHOLE = json.loads(render(dataclasses.replace(everything(), results=everything().results[:1]), "json"))


def objects(data, at=()):
    """The place of every JSON object with fixed keys."""
    if isinstance(data, dict):
        yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key not in ("packages", "variables", "yielded"):
            yield from objects(value, (*at, key))


@pytest.mark.parametrize("place", [pytest.param(at, id=".".join(map(str, at)) or "report") for at in objects(WHOLE)])
def test_the_schema_refuses_unknown_keys_other_types_and_missing_keys(place):
    def changed(change):
        data = copy.deepcopy(WHOLE)
        at_place = data
        for key in place:
            at_place = at_place[key]
        change(at_place)
        return data

    keys = changed(lambda at_place: None)
    assert not refused(keys)
    for key in place:
        keys = keys[key]
    assert refused(changed(lambda at_place: at_place.update(zebra=1)))
    for key in keys:
        assert refused(changed(lambda at_place, key=key: at_place.update({key: [[]]}))), key
        if "environment" not in place:
            assert refused(changed(lambda at_place, key=key: at_place.pop(key))), key


@pytest.mark.parametrize(
    ("enum", "words"),
    [
        (SCHEMA["$defs"]["Verdict"]["properties"]["kind"], MEANING),
        (SCHEMA["$defs"]["Record"]["properties"]["stage"], get_args(Stage)),
        (SCHEMA["$defs"]["Problem"]["properties"]["kind"], get_args(ProblemKind)),
        (SCHEMA["$defs"]["RankReport"]["properties"]["stopped"], get_args(Stop)),
        *(
            (SCHEMA["$defs"]["CaseResult"]["properties"]["scenario"]["anyOf"][0]["properties"][axis.name], axis.values)
            for axis in AXES
        ),
    ],
    ids=["verdict", "stage", "problem", "stop", *(axis.name for axis in AXES)],
)
def test_the_schema_has_the_words_of_the_code_and_no_others(enum, words):
    assert set(enum["enum"]) == set(words)
