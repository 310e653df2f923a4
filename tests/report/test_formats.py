"""The report in every format, and the schema of the JSON one."""

import copy
import dataclasses
import itertools
import json
import pathlib
from collections import Counter
from typing import get_args
from xml.etree import ElementTree

import jsonschema
import pytest

import fsdp_doctor
from fsdp_doctor.machine.environment import without_torch
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.paths import FIX
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report import markdown
from fsdp_doctor.report.document import (
    NOT_IN_OLDER_REPORTS,
    CaseResult,
    Report,
    report_from_dict,
    report_to_dict,
    result_of,
)
from fsdp_doctor.report.failure_groups import distinct_failures, numbers
from fsdp_doctor.report.formats import FORMATS, render
from fsdp_doctor.report.layout import bytes_text, summary
from fsdp_doctor.verdict.classification import MEANING, Verdict
from fsdp_doctor.verdict.records import (
    Failure,
    Problem,
    ProblemKind,
    RankReport,
    Ready,
    Record,
    Refused,
    Stage,
    Stop,
)

SCHEMA = json.loads((pathlib.Path(fsdp_doctor.__file__).parent / "report" / "schema.json").read_text())
GITHUB_LIMIT = 65_536
CASES = select(Selection())
CONTROL = "\x00 \x1b[31mred\x1b[0m \x08 \ufffe \uffff"
TRACEBACK = "Traceback (most recent call last):\n" + '  File "torch/x.py", line 1, in f\n    g(h)\n' * 100
STACK = "Current thread 0x1 (most recent call first):\n" + '  File "torch/nn/modules/module.py", line 1 in call\n' * 40


def result(case=CASES[0], kind="crash", reason="it broke", *, ranks=(), traceback="", **fields):
    if traceback:
        failure = Failure(type="RuntimeError", message=reason, traceback=traceback, time=1.5)
        ranks = (RankReport(rank=0, record=Record(case_id=case.id, stage="extract", failure=failure, done=True)),)
    verdict = Verdict(kind=kind, reason=reason, ranks=(0,) if ranks else (), also=fields.pop("also", ()))
    return CaseResult(case=case, verdict=verdict, ranks=tuple(ranks), **fields)


def report(*results, **fields):
    return Report(
        **{
            "version": "0.1.0",
            "created": "2026-01-01T00:00:00+00:00",
            "command": "fsdp-doctor probe -k 'a & b < c'",
            "device": "cuda",
            "world_size": 2,
            "num_selected": len(results),
            "environment": {"python": "3.12", "torch": "2.9.0", "accelerators": ["An accelerator"]},
            "complete": True,
            "results": results,
            **fields,
        }
    )


def every_kind(**fields):
    """A case for each verdict."""
    return [result(case, kind, f"reason of {kind}", **fields) for case, kind in zip(CASES, MEANING, strict=False)]


def everything():
    """A report in which nothing is left at its default."""
    case = Case(Scenario(**{axis.name: list(axis.values)[-1] for axis in AXES}), "mod:fn")
    record = Record(
        case_id=case.id,
        stage="next step",
        failure=Failure(type="RuntimeError", message="it\nbroke", traceback="Traceback\n", time=1.5),
        unsupported="no",
        problems=(Problem(kind="leak", detail="1 byte"),),
        seconds=0.5,
        peak_extra_bytes=7,
        num_tensors=3,
        healthy=False,
        done=True,
    )
    facts = without_torch(host_name=True) | {
        "torch": "2.9.0",
        "cuda": "12.8",
        "hip": "6",
        "accelerators": ["An accelerator"],
        "nccl": "2.27",
        "driver": "570",
    }
    rank = RankReport(
        rank=1,
        record=record,
        exit="SIGKILL",
        exit_time=2.5,
        oom_killed=True,
        stopped="deadline",
        stopped_detail="not done",
        process_state="was stopped by a signal",
        stack=STACK,
        garbled="{",
        output="text",
        refused=Refused(reason="no device", exit_code=3),
        ready=Ready(environment=facts),
    )
    verdict = Verdict(kind="leak", reason="1 byte", ranks=(1,), also=("poisoned: w",))
    one = CaseResult(
        case=case,
        verdict=verdict,
        seconds=0.5,
        peak_extra_bytes=7,
        wall_seconds=1.25,
        confirmation=dataclasses.replace(verdict, kind="ok"),
        ranks=(rank, RankReport(rank=0)),
    )
    return report(
        one,
        *every_kind(),
        environment=facts,
        rerun_options="--nproc 2",
        notes=("a note",),
        complete=False,
        ended="SIGINT",
        seconds=9.5,
    )


def squeezed(text):
    return "".join(text.split())


# All of them.


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("made", [report(), everything(), report(*every_kind())], ids=["empty", "everything", "kinds"])
def test_every_format_of_every_report_ends_in_a_newline(name, made):
    text = render(made, name)
    assert text == "" or text.endswith("\n")
    assert made.results == () or text.strip()


@pytest.mark.parametrize("name", ["table", "lines", "json", "markdown", "junit"])
def test_every_format_but_the_picture_has_every_verdict_and_reason(name):
    text = squeezed(render(report(*every_kind()), name, width=400))
    for kind in MEANING:
        assert kind in text or (kind, name) == ("ok", "junit")
        if kind not in ("ok", "unsupported", "skipped"):
            assert squeezed(f"reason of {kind}") in text


# Table.


@pytest.mark.parametrize("width", [1, 60, 80, 132, 250])
@pytest.mark.parametrize(
    "reason",
    [
        "word " * 400,
        "x" * 700,
        "a/path/" * 60 + " and a word",
        "[bold]no markup[/bold] :warning: [/] [link=x]",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5), [rank 0] é漢字",
    ],
    ids=["words", "one word", "path", "markup", "other letters"],
)
def test_a_reason_below_the_table_is_never_cut(width, reason):
    text = render(report(result(reason=reason, also=(f"rank 1 then: {reason}",))), "table", width=width)
    assert squeezed(f"1  crash, 1 case: {reason}") in squeezed(text)
    assert squeezed(f"also: rank 1 then: {reason}") in squeezed(text)
    assert "…" not in text.rpartition("1  crash")[2]


def test_the_table_has_colour_only_where_it_is_asked_for():
    assert "\x1b[" not in render(report(*every_kind()), "table", color=False)
    assert "\x1b[" in render(report(*every_kind()), "table", color=True)


@pytest.mark.parametrize("width", [80, 100, 132])
def test_no_row_of_the_matrix_is_wider_than_the_terminal_or_cut(width):
    text = render(report(*every_kind(), result(CASES[40], reason="x" * 500)), "table", width=width)
    rows = [line for line in text.splitlines() if set(line) & set("│┃━─")]
    assert max(len(row) for row in rows) <= width
    assert "…" not in text


def test_the_table_says_how_each_failure_is_run_alone():
    results = [result(case) for case in CASES[:5]]
    text = squeezed(render(report(*results, rerun_options="--nproc 2 --device cpu"), "table", width=132))
    for one in results[:3]:
        assert squeezed(f"fsdp-doctor probe --nproc 2 --device cpu --case '{one.id}'") in text
    assert squeezed("and 2 more") in text


@pytest.mark.parametrize(
    ("confirmation", "words"), [("crash", "(confirmed)"), ("ok", "(not confirmed)"), (None, "")], ids=str
)
def test_the_table_says_whether_a_failure_was_seen_twice(confirmation, words):
    verdict = Verdict(kind=confirmation) if confirmation else None
    text = render(report(result(confirmation=verdict)), "table", width=200)
    assert words in text
    assert ("confirmed)" in text) is bool(words)


def test_a_grid_in_which_nothing_could_be_built_is_one_line_with_the_reason():
    cases = [case for case in CASES if case.scenario.strategy == "fsdp1" and case.scenario.staging == "staged"]
    text = render(report(*(result(case, "unsupported", "no accelerator") for case in cases)), "table", width=200)
    assert f"fsdp1, staged: {len(cases)} cases unsupported: no accelerator" in text
    assert cases[0].path not in text.split()


def test_a_grid_in_which_all_is_well_is_still_a_matrix():
    text = render(report(*(result(case, "ok", "") for case in CASES[:4])), "table", width=200)
    assert all(case.path in text for case in CASES[:4])


# Lines.


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\t"])
def test_lines_are_one_line_for_each_case_even_where_a_reason_has_several(newline):
    reason = newline.join(["first", "second", "", "third"])
    results = [result(case, reason=reason, also=(reason, reason)) for case in CASES[:7]]
    lines = render(report(*results), "lines").splitlines()
    assert [line.split("\t")[0] for line in lines] == [one.id for one in results]
    assert [line.split("\t")[4:] for line in lines] == [["first second third"] * 3] * 7


def test_a_line_is_never_cut():
    reason = "word " * 5000 + "end"
    assert render(report(result(reason=reason)), "lines").endswith(reason + "\n")


def test_a_line_has_the_verdict_the_figures_and_those_of_the_fix():
    fix = result(Case(CASES[0].scenario, FIX), "ok", "", seconds=0.5, peak_extra_bytes=2048)
    one = result(CASES[0], seconds=1.25, peak_extra_bytes=None, confirmation=Verdict(kind="ok"))
    lines = render(report(one, fix), "lines").splitlines()
    assert lines[0].split("\t") == [
        one.id, "crash", "1.2500 s", "-", "fix", "ok", "0.5000 s", "2.0 KiB", "not confirmed: then ok", "it broke",
    ]  # fmt: skip
    assert lines[1].split("\t") == [fix.id, "ok", "0.5000 s", "2.0 KiB"]


# JUnit.


def junit(made):
    return ElementTree.fromstring(render(made, "junit").encode())


@pytest.mark.parametrize("kind", MEANING)
def test_junit_has_the_outcome_of_each_verdict(kind):
    [suite] = junit(report(result(kind=kind)))
    [case] = suite
    expected = {"ok": [], "unsupported": ["skipped"], "skipped": ["skipped"], "lost": ["error"]}
    assert [child.tag for child in case] == expected.get(kind, ["failure"])
    assert all(child.get("message") == f"{kind}: it broke" for child in case)


def test_junit_counts_what_its_suites_hold():
    results = [
        result(case, kind, wall_seconds=0.5) for case, kind in zip(CASES[:300], itertools.cycle(MEANING), strict=False)
    ]
    root = junit(report(*results))
    assert {suite.get("name") for suite in root} == {one.case.scenario.id for one in results}
    assert sum(int(suite.get("tests")) for suite in root) == len(results)
    for suite in root:
        tags = Counter(child.tag for case in suite for child in case)
        assert int(suite.get("tests")) == len(suite)
        assert int(suite.get("failures")) == tags["failure"]
        assert int(suite.get("errors")) == tags["error"]
        assert int(suite.get("skipped")) == tags["skipped"]
        assert float(suite.get("time")) == pytest.approx(0.5 * len(suite))


def test_junit_has_each_case_under_its_scenario_and_path():
    results = [result(case) for case in CASES[:50]]
    found = [(case.get("classname"), case.get("name")) for case in junit(report(*results)).iter("testcase")]
    assert found == [(one.case.scenario.id, one.case.path) for one in results]


@pytest.mark.parametrize("text", [CONTROL, "\ud800 alone", "]]> & <failure> \"quoted\" 'too'", "漢字 é 🙂"])
def test_junit_survives_whatever_a_worker_wrote(text):
    rank = RankReport(rank=0, stack=text, stopped="deadline")
    failed = result(reason=text, traceback=text)
    root = junit(report(dataclasses.replace(failed, ranks=(*failed.ranks, rank)), command=text))
    [failure] = root.iter("failure")
    survivors = "".join(c for c in text if c in "\t\n\r" or (c >= " " and c not in "\ufffe\uffff\ud800"))
    assert failure.get("message").replace("?", "") == f"crash: {survivors}"
    assert failure.text.replace("?", "").count(survivors) == 3


def test_junit_has_tracebacks_stacks_and_the_command_for_the_case_alone():
    rank = RankReport(rank=1, stack=STACK, stopped="others")
    failed = result(traceback=TRACEBACK, also=("rank 1 was busy",))
    [failure] = junit(report(dataclasses.replace(failed, ranks=(*failed.ranks, rank)))).iter("failure")
    for part in (TRACEBACK.strip(), STACK.strip(), "rank 1 was busy", f"--case '{failed.id}'"):
        assert part in failure.text


@pytest.mark.parametrize("results", [0, 3])
def test_an_incomplete_run_is_an_error_in_junit(results):
    made = report(
        *(result(case, "ok") for case in CASES[:results]), complete=False, num_selected=9, ended="SIGINT \x00"
    )
    suite = junit(made)[-1]
    [case] = suite
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    assert case.find("error").get("message") == f"the run is incomplete: SIGINT ?; {9 - results} cases have no result"


def test_a_complete_run_without_lost_cases_has_no_error_in_junit():
    results = [one for one in every_kind() if one.verdict.kind != "lost"]
    assert not list(junit(report(*results)).iter("error"))


# Markdown.


@pytest.mark.parametrize(
    ("kind", "reason", "with_fix"),
    [
        ("ok", "", False),
        ("crash", "the same for all", False),
        ("crash", "number {}", False),
        ("crash", "number {}", True),
        ("crash", "number {} " + "long " * 700, False),
    ],
    ids=["ok", "alike", "distinct", "with the fix", "long"],
)
def test_5000_cases_are_markdown_that_github_takes(kind, reason, with_fix):
    cases = select(Selection(full=True, fix=with_fix))[:5000]
    assert len(cases) == 5000
    results = [result(case, kind, reason.format(i), traceback=TRACEBACK) for i, case in enumerate(cases)]
    text = render(report(*results), "markdown")
    assert len(text) < GITHUB_LIMIT
    assert summary(report(*results)) in text


def test_markdown_has_every_distinct_failure_where_they_fit():
    results = [result(case, reason=f"trouble {i}.", traceback=TRACEBACK) for i, case in enumerate(CASES[:60])]
    text = render(report(*results), "markdown")
    assert len(text) < GITHUB_LIMIT
    for number, one in enumerate(results, start=1):
        assert f"### [{number}] crash: 1 case\n\n```\n{one.verdict.reason}\n```" in text
        assert f"--case '{one.id}'" in text
    assert "more distinct failures" not in text


def test_markdown_counts_the_distinct_failures_that_did_not_fit():
    results = [result(case, reason=f"trouble {i} " + "long " * 200) for i, case in enumerate(CASES)]
    text = render(report(*results), "markdown")
    shown = text.count("\n### [")
    assert 0 < shown < len(results)
    assert f"\n{len(results) - shown} more distinct failures are in the JSON report.\n" in text


def test_markdown_still_has_a_failure_whose_stacks_do_not_fit():
    ranks = [RankReport(rank=rank, stack=STACK * 4, stopped="deadline") for rank in range(128)]
    hang = result(CASES[0], "hang", "not done after 60 s", ranks=ranks)
    text = render(report(hang, result(CASES[1]), world_size=128), "markdown")
    assert len(text) < GITHUB_LIMIT
    assert "not done after 60 s" in text
    assert "it broke" in text


def test_markdown_still_has_the_failures_after_one_that_does_not_fit():
    results = [result(CASES[0], reason="x" * GITHUB_LIMIT), result(CASES[1])]
    assert "it broke" in render(report(*results), "markdown")


def test_markdown_shows_the_end_of_a_traceback_and_the_main_threads_stack():
    numbered = "\n".join(f"frame {i}." for i in range(100))
    stack = "Thread 0x1\n  other thread\n\nCurrent thread 0x2\n  main thread\n"
    failed = result(traceback=numbered)
    rank = RankReport(rank=1, stack=stack, stopped="others")
    text = render(report(dataclasses.replace(failed, ranks=(*failed.ranks, rank))), "markdown")
    assert "frame 99." in text
    assert "frame 0." not in text
    assert "Stack of rank 1" in text
    assert "main thread" in text
    assert "other thread" not in text


def test_markdown_rows_have_as_many_cells_as_their_header():
    kinds = itertools.cycle(MEANING)
    text = markdown.render(report(*(result(case, next(kinds)) for case in select(Selection(fix=True)))))
    tables = [list(rows) for is_row, rows in itertools.groupby(text.splitlines(), lambda x: x[:1] == "|") if is_row]
    assert len(tables) == 5
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1


# SVG.


@pytest.mark.parametrize("text", ["it broke", "<tag> & \"quoted\" 'too' ]]>", "漢字 é 🙂", CONTROL])
def test_the_picture_is_well_formed_xml_whatever_a_worker_wrote(text):
    made = report(*every_kind(), result(CASES[50], reason=text), command=f"fsdp-doctor probe {text}")
    root = ElementTree.fromstring(render(made, "svg").encode())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_picture_has_the_matrix_the_reasons_and_the_summary():
    made = report(*every_kind())
    words = "".join(ElementTree.fromstring(render(made, "svg").encode()).itertext())
    for part in (*MEANING, "reason of crash", CASES[0].path, summary(made), "2 x An accelerator"):
        assert squeezed(part) in squeezed(words)


# JSON, its schema, and the way back.


def test_a_report_comes_back_from_its_dict_and_from_its_json():
    for made in (report(), report(*every_kind()), everything()):
        assert report_from_dict(report_to_dict(made)) == made
        assert report_from_dict(json.loads(render(made, "json"))) == made


def validate(data):
    jsonschema.validate(data, SCHEMA, cls=jsonschema.Draft202012Validator)


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


# What the formats share.


def test_failures_that_differ_only_in_ranks_and_devices_are_one_and_the_most_frequent_is_first():
    reasons = ["rank 0: other", "rank 0: on cuda:0", "ranks 1, 3: on cuda:1", "on cuda:7", "rank 2: OTHER"]
    results = [result(case, reason=reason) for case, reason in zip(CASES, reasons, strict=False)]
    results.append(result(CASES[10], "hang", "on cuda:0"))
    results.append(result(CASES[11], "ok", ""))
    failures = distinct_failures(report(*results))
    assert [(f.number, f.kind, f.reason, len(f.results)) for f in failures] == [
        (1, "crash", "rank 0: on cuda:0", 3),
        (2, "crash", "rank 0: other", 1),
        (3, "crash", "rank 2: OTHER", 1),
        (4, "hang", "on cuda:0", 1),
    ]
    assert [numbers(failures).get(one.id) for one in results] == [2, 1, 1, 1, 3, 4, None]


def test_a_failure_shows_the_traceback_of_a_rank_that_the_verdict_names():
    case = CASES[0]

    def rank(number):
        failure = Failure(type="E", message="m", traceback=f"of rank {number}", time=1.0)
        return RankReport(rank=number, record=Record(case_id=case.id, stage="extract", failure=failure))

    verdict = Verdict(kind="crash", reason="m", ranks=(2,))
    one = result_of(case, verdict, [rank(0), RankReport(rank=1), rank(2)], 1.0)
    assert distinct_failures(report(one))[0].traceback == "of rank 2"


def test_a_result_sums_up_the_slowest_and_the_largest_rank_and_keeps_reports_of_bad_cases_alone():
    ranks = [
        RankReport(rank=r, record=Record(case_id="x", stage="next step", seconds=s, peak_extra_bytes=p, done=True))
        for r, (s, p) in enumerate([(0.25, 7), (0.75, None), (None, 3)])
    ]
    for kind in MEANING:
        one = result_of(CASES[0], Verdict(kind=kind), [*ranks, RankReport(rank=3)], 2.0)
        assert (one.seconds, one.peak_extra_bytes, one.wall_seconds) == (0.75, 7, 2.0)
        assert bool(one.ranks) is one.verdict.bad


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "3 cases on 2 ranks of cuda: 2 ok, 1 crash"),
        (
            {"complete": False, "num_selected": 9},
            "3 cases of 9 selected (incomplete: still running) on 2 ranks of cuda",
        ),
        ({"complete": False, "num_selected": 9, "ended": "stopped by SIGINT"}, "(incomplete: stopped by SIGINT)"),
        ({"results": ()}, "0 cases on 2 ranks of cuda: no result"),
    ],
)
def test_the_summary_counts_verdicts_and_says_what_is_missing(fields, expected):
    made = report(result(CASES[0], "ok"), result(CASES[1]), result(CASES[2], "ok"))
    assert expected in summary(dataclasses.replace(made, **fields))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_keeps_it_readable(number, text):
    assert bytes_text(number) == text
