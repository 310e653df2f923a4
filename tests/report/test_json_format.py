"""The report as JSON: its schema, and the way back."""

import copy
import dataclasses
import json
from typing import get_args

import jsonschema
import pytest
from support.reports import (
    SCHEMA,
    every_kind,
    everything,
    report,
)

from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.report.document import (
    NOT_IN_OLDER_REPORTS,
    report_from_dict,
    report_to_dict,
)
from fsdp_doctor.report.formats import render
from fsdp_doctor.verdict.classification import MEANING
from fsdp_doctor.verdict.records import (
    ProblemKind,
    Stage,
    Stop,
)


def test_a_report_comes_back_from_its_dict_and_from_its_json():
    for made in (report(), report(*every_kind()), everything()):
        assert report_from_dict(report_to_dict(made)) == made
        assert report_from_dict(json.loads(render(made, "json"))) == made


def validate(data):
    jsonschema.validate(data, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_a_refusal_in_a_report_of_the_first_version_is_read_as_one():
    data = json.loads(json.dumps(report_to_dict(report(*every_kind()))))
    data["schema_version"] = 1
    data["results"][0]["verdict"] |= {"kind": "ok", "reason": "refused on every rank: KeyError: 'extra'"}
    jsonschema.validate(data, SCHEMA, cls=jsonschema.Draft202012Validator)
    first, second, *_ = report_from_dict(data).results
    assert (first.verdict.kind, first.verdict.reason) == ("refused", "KeyError: 'extra'")
    assert (second.verdict.kind, second.verdict.reason) == ("refused", "reason of refused")


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("made", [report(), report(*every_kind()), everything()], ids=["empty", "kinds", "everything"])
def test_what_is_written_is_valid_by_the_schema(made):
    validate(json.loads(render(made, "json")))


def objects(data, at=()):
    """The place of every JSON object whose keys are ours, but for the tables of names."""
    if isinstance(data, dict):
        yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key not in ("packages", "variables", "yielded"):
            yield from objects(value, (*at, key))


WHOLE = json.loads(render(dataclasses.replace(everything(), results=everything().results[:1]), "json"))
PLACES = [pytest.param(place, id=".".join(map(str, place)) or "report") for place in objects(WHOLE)]


def reached(place):
    """A copy of WHOLE, and the object in it at that place."""
    data = copy.deepcopy(WHOLE)
    found = data
    for key in place:
        found = found[key]
    return data, found


@pytest.mark.parametrize("place", PLACES)
def test_the_schema_refuses_a_key_that_we_do_not_write(place):
    data, found = reached(place)
    validate(data)
    found["zebra"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(data)


@pytest.mark.parametrize("place", PLACES)
def test_the_schema_refuses_a_value_of_another_type(place):
    for key in reached(place)[1]:
        data, found = reached(place)
        found[key] = [[]]
        with pytest.raises(jsonschema.ValidationError):
            validate(data)


@pytest.mark.parametrize("place", [place for place in PLACES if "environment" not in place.id])
def test_the_schema_misses_a_key_that_we_always_write(place):
    for key in reached(place)[1].keys() - NOT_IN_OLDER_REPORTS:
        data, found = reached(place)
        del found[key]
        with pytest.raises(jsonschema.ValidationError):
            validate(data)


@pytest.mark.parametrize(
    ("enum", "words"),
    [
        (SCHEMA["$defs"]["verdict_kind"], list(MEANING)),
        (SCHEMA["$defs"]["stage"], get_args(Stage)),
        (SCHEMA["$defs"]["problem"]["properties"]["kind"], get_args(ProblemKind)),
        (SCHEMA["$defs"]["rank"]["properties"]["stopped"], get_args(Stop)),
        *((SCHEMA["$defs"]["scenario"]["properties"][axis.name], list(axis.values)) for axis in AXES),
    ],
    ids=["verdict", "stage", "problem", "stop", *(axis.name for axis in AXES)],
)
def test_the_schema_has_the_words_of_the_code_and_no_others(enum, words):
    assert enum["enum"] == list(words)


@pytest.mark.parametrize(
    "place", [("verdict", "kind"), ("confirmation", "kind"), ("ranks", 0, "record", "stage"), ("scenario", "offload")]
)
def test_the_schema_refuses_a_word_that_the_code_does_not_have(place):
    *path, key = place
    data, found = reached(("results", 0, *path))
    found[key] = "zebra"
    with pytest.raises(jsonschema.ValidationError):
        validate(data)
