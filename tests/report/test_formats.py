"""The report in every format that is made for people and for programs that count tests."""

import dataclasses
import itertools
from collections import Counter
from xml.etree import ElementTree

import pytest
from support.reports import (
    CASES,
    CONTROL,
    GITHUB_LIMIT,
    STACK,
    TRACEBACK,
    every_kind,
    everything,
    report,
    result,
    squeezed,
)

from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.methods import FIX
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report import markdown
from fsdp_doctor.report.formats import FORMATS, render
from fsdp_doctor.report.layout import summarize
from fsdp_doctor.verdict.classification import GOOD, MEANING, NOT_RUN, Verdict
from fsdp_doctor.verdict.records import (
    RankReport,
)


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
        if kind not in GOOD | NOT_RUN:
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


def test_only_a_command_is_wider_than_the_terminal():
    known = result(CASES[40], reason="x " * 500, known="fsdp2-pinned-policy-half-moved")
    text = render(report(*every_kind(), known), "table", width=80)
    assert "FD001" in text
    assert [line for line in text.splitlines() if len(line) > 80 and "fsdp-doctor probe" not in line] == []


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


def test_a_grid_without_any_built_case_is_one_line_with_the_reason():
    cases = [case for case in CASES if case.scenario.id.startswith("fsdp1/") and case.scenario.id.endswith("/staged")]
    text = render(report(*(result(case, "unsupported", "no accelerator") for case in cases)), "table", width=200)
    assert f"fsdp1, staged: {len(cases)} cases unsupported: no accelerator" in text
    assert cases[0].method not in text.split()
    well = render(report(*(result(case, "ok", "") for case in CASES[:4])), "table", width=200)
    assert all(case.method in well for case in CASES[:4])


# Lines.


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\t"])
def test_each_case_is_one_line_even_if_its_reason_has_several_lines(newline):
    reason = newline.join(["first", "second", "", "third " + "and more " * 1000])
    results = [result(case, reason=reason, also=(reason, reason)) for case in CASES[:7]]
    lines = render(report(*results), "lines").splitlines()
    assert [line.split("\t")[0] for line in lines] == [one.id for one in results]
    assert [line.split("\t")[4:] for line in lines] == [["first second third" + " and more" * 1000] * 3] * 7


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
    expected = {"ok": [], "refused": ["system-out"], "lost": ["error"]} | {kind: ["skipped"] for kind in NOT_RUN}
    assert [child.tag for child in case] == expected.get(kind, ["failure"])
    assert all((child.get("message") or child.text) == f"{kind}: it broke" for child in case)


def test_junit_has_each_case_under_its_scenario_and_counts_them():
    results = [
        result(case, kind, wall_seconds=0.5) for case, kind in zip(CASES[:300], itertools.cycle(MEANING), strict=False)
    ]
    root = junit(report(*results))
    named = [(suite.get("name"), case.get("classname"), case.get("name")) for suite in root for case in suite]
    assert named == [(each.case.scenario.id, each.case.scenario.id, each.method) for each in results]
    for suite in root:
        tags = Counter(child.tag for case in suite for child in case)
        assert int(suite.get("tests")) == len(suite)
        assert int(suite.get("failures")) == tags["failure"]
        assert int(suite.get("errors")) == tags["error"]
        assert int(suite.get("skipped")) == tags["skipped"]
        assert float(suite.get("time")) == pytest.approx(0.5 * len(suite))


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
    cases = select(Selection(level="full", fix=with_fix))[:5000]
    assert len(cases) == 5000
    results = [result(case, kind, reason.format(i), traceback=TRACEBACK) for i, case in enumerate(cases)]
    text = render(report(*results), "markdown")
    assert len(text) < GITHUB_LIMIT
    assert summarize(report(*results)) in text


def test_markdown_has_every_distinct_failure_where_they_fit():
    results = [result(case, reason=f"trouble {i}.", traceback=TRACEBACK) for i, case in enumerate(CASES[:60])]
    text = render(report(*results), "markdown")
    assert len(text) < GITHUB_LIMIT
    for number, one in enumerate(results, start=1):
        assert f"### [{number}] crash: 1 case\n\n```\n{one.verdict.reason}\n```" in text
        assert f"--case '{one.id}'" in text
    assert "more distinct failures" not in text


def test_markdown_has_the_command_of_a_known_failures_script():
    known, unknown = result(CASES[0], known="fsdp2-pinned-policy-half-moved"), result(CASES[1], "wrong")
    assert f"`fsdp-doctor repro '{CASES[0].id}'`" in render(report(known, unknown), "markdown")
    assert CASES[1].id in render(report(unknown), "markdown")
    assert "fsdp-doctor repro" not in render(report(unknown), "markdown")


def test_markdown_counts_the_distinct_failures_that_did_not_fit():
    results = [result(case, reason=f"trouble {i} " + "long " * 200) for i, case in enumerate(CASES)]
    text = render(report(*results), "markdown")
    shown = text.count("\n### [")
    assert 0 < shown < len(results)
    assert f"\n{len(results) - shown} more distinct failures are in the JSON report.\n" in text


def test_markdown_keeps_failures_whose_stacks_do_not_fit():
    ranks = [RankReport(rank=rank, stack=STACK * 4, stopped="deadline") for rank in range(128)]
    hang = result(CASES[0], "hang", "not done after 60 s", ranks=ranks)
    text = render(report(hang, result(CASES[1]), world_size=128), "markdown")
    assert len(text) < GITHUB_LIMIT
    assert "not done after 60 s" in text
    assert "it broke" in text
    long = result(CASES[0], reason="x" * GITHUB_LIMIT)
    assert "it broke" in render(report(long, result(CASES[1])), "markdown")


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
    text = markdown.render(
        report(*(result(case, next(kinds)) for case in select(Selection(directions=("out",), fix=True))))
    )
    tables = [list(rows) for is_row, rows in itertools.groupby(text.splitlines(), lambda x: x[:1] == "|") if is_row]
    assert len(tables) > 4
    for rows in tables:
        assert len({row.count("|") for row in rows}) == 1


# SVG.


@pytest.mark.parametrize("text", ["it broke", "<tag> & \"quoted\" 'too' ]]>", "漢字 é 🙂", CONTROL])
def test_the_picture_is_well_formed_xml_whatever_a_worker_wrote(text):
    made = report(*every_kind(), result(CASES[50], reason=text), command=f"fsdp-doctor probe {text}")
    root = ElementTree.fromstring(render(made, "svg").encode())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_picture_has_a_method_of_two_strategies_in_one_row():
    cases = select(Selection(axes={"strategy": ("fsdp1", "fsdp2")}, directions=("out",), methods=("state_dict",)))
    root = ElementTree.fromstring(render(report(*(result(case, "ok", "") for case in cases)), "svg").encode())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(text) for text in ("state_dict", "fsdp1", "fsdp2")] == [1, 1, 1]


def test_the_picture_has_the_matrix_the_reasons_and_the_summary():
    made = report(*every_kind())
    words = "".join(ElementTree.fromstring(render(made, "svg").encode()).itertext())
    for part in (*MEANING, "reason of crash", CASES[0].method, summarize(made), "2 x An accelerator"):
        assert squeezed(part) in squeezed(words)
