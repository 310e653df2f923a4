"""The page of a merged report: one file that needs nothing else, and in which everything from a report is text."""

from __future__ import annotations

import html
import html.parser
import json
import pathlib
import re
import sys
from typing import Any

import pytest
from support import pages, reports
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import find_entry, read_catalogue
from fsdp_doctor.matrix.axes import Offload, Staging, Strategy
from fsdp_doctor.report.document import convert_report_to_dict
from fsdp_doctor.report.page import render_page
from fsdp_doctor.report.page.compat_page import make_page_data, put_newest_first
from fsdp_doctor.report.versions.merged import read_merged
from fsdp_doctor.report.versions.merging import merge

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TEN = [f"2.{minor}.0" for minor in range(6, 16)]


class _Elements(html.parser.HTMLParser):
    """Every element with its attributes, the ids, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(pages.merged_devices())


@pytest.fixture(scope="module")
def elements(page: str) -> _Elements:
    return _Elements(page)


def _report_file(directory: pathlib.Path, name: str, *results: Any, **fields: Any) -> str:
    file = directory / name
    file.write_text(json.dumps(convert_report_to_dict(pages.report_of("2.13.0", results, **fields))))
    return str(file)


def test_of_ten_versions_of_the_default_matrix_it_is_below_two_megabytes() -> None:
    text = render_page(pages.merged_versions(*_TEN))
    assert 100_000 < len(text.encode()) < 2_000_000


def test_it_loads_nothing_from_anywhere(elements: _Elements) -> None:
    loading = [(tag, at) for tag, at in elements.found if "src" in at or (tag == "link" and at.get("href") != "data:,")]
    assert loading == []
    policy = next(at["content"] for _, at in elements.found if at.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_what_a_program_wrote_into_a_report_is_text(elements: _Elements) -> None:
    assert len(elements.scripts) == 2
    assert not [tag for tag, _ in elements.found if tag in ("img", "b")]
    assert pages.HOSTILE in json.loads(elements.scripts[0])["texts"]


def test_names_and_notes_of_an_environment_are_text_too() -> None:
    results = [reports.result(pages.CASES[0], "ok", "")]
    fields = {"command": pages.HOSTILE, "notes": (pages.HOSTILE,), "ended": pages.HOSTILE, "complete": False}
    merged = merge({"a": pages.report_of(f"2.13.0+{pages.HOSTILE}", results, **fields)})
    found = _Elements(render_page(merged))
    assert len(found.scripts) == 2
    assert not [tag for tag, _ in found.found if tag in ("img", "b")]


def test_every_case_and_outcome_comes_back_out_of_the_numbers() -> None:
    merged = pages.merged_devices()
    data = json.loads(json.dumps(make_page_data(merged)))
    for row, case in zip(data["cases"], merged.cases, strict=True):
        others, direction, method, outcomes, statements, changed = row[3:]
        words = [data["axes"][axis][at] for axis, at in zip(("strategy", "offload", "staging"), row, strict=False)]
        assert "/".join(filter(None, [*words, data["texts"][others], data["methods"][method]])) == case.id
        assert data["axes"]["direction"][direction] == case.direction
        assert [None if at < 0 else at for at in outcomes] == list(case.outcomes)
        assert [data["texts"][at] for at in statements] == [f"{one.where}: {one.text}" for one in case.statements]
        assert bool(changed) == any(one.changes for one in case.statements)
    for (kind, reason, message, also, known), outcome in zip(data["outcomes"], merged.outcomes, strict=True):
        assert (data["kinds"][kind], data["texts"][reason]) == (outcome.kind, outcome.reason)
        assert outcome.message in (data["texts"][message], data["texts"][reason])
        assert (data["texts"][also], data["texts"][known]) == ("\n".join(outcome.also), outcome.known)


def test_every_known_failure_is_on_the_page_and_explain_prints_its_address(elements: _Elements) -> None:
    ids = {at.get("id") for _, at in elements.found}
    for entry in read_catalogue():
        assert f"entry-{entry.id}" in ids
    printed = doctor("explain", pages.KNOWN).stdout.splitlines()[-1]
    documentation = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    assert printed == f"Page: {documentation}failures/{find_entry(pages.KNOWN).short_code}/"


def test_the_committed_runs_have_a_page() -> None:
    assert "2.13.0" in render_page(read_merged(ROOT / "docs" / "compat" / "merged.json.gz"))


def test_ids_are_given_once(elements: _Elements) -> None:
    ids = [at["id"] for _, at in elements.found if "id" in at]
    assert len(ids) == len(set(ids))


def test_an_environment_that_is_incomplete_says_so(page: str) -> None:
    assert re.search(r'torch 2\.12\.0, emulated <span class="incomplete">incomplete</span>', page)
    assert "<dd>stopped by SIGINT</dd>" in page


def test_a_report_without_results_has_no_page() -> None:
    with pytest.raises(UsageError, match="no results"):
        render_page(merge({"a": pages.report_of("2.13.0", [])}))


def test_merge_says_why_reports_without_results_have_no_page(
    tmp_path: pathlib.Path,
) -> None:
    report = _report_file(tmp_path, "a.json", num_selected=5, complete=False)
    outputs = ("--json", str(tmp_path / "merged.json"), "--html", str(tmp_path / "page.html"))
    done = doctor("report", "merge", report, *outputs)
    sentence = "fsdp-doctor: the reports have no results, so there is nothing to show on a page\n"
    assert (done.code, done.stderr) == (2, sentence)
    assert json.loads((tmp_path / "merged.json").read_text())["cases"] == []
    assert not (tmp_path / "page.html").exists()


def test_a_merged_report_has_the_same_page_as_its_reports(tmp_path: pathlib.Path) -> None:
    report = _report_file(tmp_path, "a.json", *pages.results_of("2.13.0"))
    merged = str(tmp_path / "merged.json.gz")
    assert doctor("report", "merge", report, "--json", merged, "--html", str(tmp_path / "one.html")).code == 0
    assert doctor("report", "merge", merged, "--html", str(tmp_path / "two.html")).code == 0
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


@pytest.mark.parametrize(
    ("output", "code", "sentence"),
    [
        ("/nowhere/page.html", 2, "cannot write /nowhere/page.html: No such file or directory"),
        ("/dev/full", 4, "cannot write /dev/full: it exists, but is not a regular file"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_sentence(
    tmp_path: pathlib.Path, output: str, code: int, sentence: str
) -> None:
    report = _report_file(tmp_path, "a.json", *pages.results_of("2.13.0")[:3])
    done = doctor("report", "merge", report, "--html", output)
    assert (done.code, done.stderr) == (code, f"fsdp-doctor: {sentence}\n")


def test_two_outputs_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    report = _report_file(tmp_path, "a.json", *pages.results_of("2.13.0")[:3])
    same = str(tmp_path / "x")
    done = doctor("report", "merge", report, "--html", same, "--json", same)
    assert (done.code, done.stderr) == (2, "fsdp-doctor: Invalid value for '--json': --html names the same file\n")


def test_the_newest_torch_is_first_with_its_own_outcomes() -> None:
    merged = pages.merged_devices()
    newest = put_newest_first(merged)
    assert [one.torch for one in newest.environments] == ["2.13.0", "2.12.0", "2.11.0"]
    for before, after in zip(merged.cases, newest.cases, strict=True):
        shown = {one.name: merged.show(before, number) for number, one in enumerate(merged.environments)}
        assert shown == {one.name: newest.show(after, number) for number, one in enumerate(newest.environments)}


def test_the_words_of_the_fields_have_their_meanings(page: str) -> None:
    for value in (Strategy.FSDP1, Strategy.FSDP2, *Staging, Offload.parse("policy")):
        assert value.meaning in html.unescape(page)


def test_the_last_column_is_a_version_that_did_not_install() -> None:
    never = pages.report_of("2.9", [], device="auto", world_size=0, complete=False, ended="torch 2.9 does not install")
    merged = merge({"never.json": never, "ran.json": pages.report_of("2.13.0", pages.results_of("2.13.0")[:3])})
    _, last = make_page_data(put_newest_first(merged))["environments"]
    assert (last["torch"], last["device"], last["more"]) == ("2.9", make_page_data(merged)["nowhere"], "")
    assert last["incomplete"] == "torch 2.9 does not install"
