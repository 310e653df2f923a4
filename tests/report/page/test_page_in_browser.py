"""The page in a real browser: filters, search, links, keyboard, screen reader, contrast, two widths.

It takes Playwright (`pip install playwright`) and Debian's Chromium (`apt-get install chromium`); never in CI.
FSDP_DOCTOR_SCREENSHOTS names a folder that the screenshots are kept in, FSDP_DOCTOR_AXE the file axe.min.js of the npm
package axe-core.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from support import pages

from fsdp_doctor.report.page import write_page

_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif("CI" in os.environ, reason="no browser in CI"),
]
_WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}
_ENVIRONMENT = "torch 2.13.0, emulated"
_ANCHOR = "torch-2.13.0-emulated"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with _api.sync_playwright() as playwright:
        # The sandbox takes privileges that a container does not have.
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "compat.html"
    write_page(file, pages.merged_devices())
    return file.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page at its first view; a test fails if the browser complains of anything."""
    yield from _opened(browser, address, *_WIDTHS["wide"], "light")


def _opened(browser: Any, address: str, width: int, height: int, scheme: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto(address)
    yield page
    context.close()
    assert complaints == []


def _rows(page: Any) -> list[str]:
    """The ids of the cases that the matrix shows."""
    shown: list[str] = page.eval_on_selector_all(
        "#matrix tbody tr:has(td)", "rows => rows.map(row => row.querySelector('button').dataset.case)"
    )
    return shown


def _link(case: str, anchor: str = _ANCHOR) -> str:
    return f"#{urlencode({'case': case, 'env': anchor})}"


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [("Strategy", "fsdp1", "fsdp1/"), ("Offload", "param", "/param/"), ("Staging", "staged", "/staged/")],
)
def test_a_choice_shows_the_cases_of_it_alone(page: Any, field: str, value: str, part: str) -> None:
    page.get_by_label(field, exact=True).select_option(value)
    rows = _rows(page)
    assert rows
    assert all(part in f"{row}/" for row in rows)
    assert f"{len(rows)} of " in page.locator("#count").text_content()


def test_a_choice_lets_go_of_what_leaves_no_case_beside_it(page: Any) -> None:
    assert page.get_by_label("Offload", exact=True).input_value() == "policy"
    page.get_by_label("Strategy", exact=True).select_option("accelerate:fsdp2")
    assert page.get_by_label("Offload", exact=True).input_value() == "any"
    rows = _rows(page)
    assert rows
    assert all(row.startswith("accelerate:fsdp2/") for row in rows)
    # The run of torch 2.12.0 was cut short, that of torch 2.11.0 was of other cases.
    assert page.get_by_role("columnheader", name="cuda").count() == 0
    assert page.get_by_role("columnheader", name="emulated").count() == 1
    assert page.locator("#count").text_content().endswith("; 2 more have no result of these cases")
    assert "" not in page.get_by_label("Staging", exact=True).locator("option").all_text_contents()


@pytest.mark.parametrize("width", _WIDTHS)
def test_the_newest_torch_is_the_first_column_and_in_the_window(browser: Any, address: str, width: str) -> None:
    for page in _opened(browser, address, *_WIDTHS[width], "light"):
        first = page.locator("#matrix thead th").nth(1)
        assert first.text_content().startswith("torch 2.13.0")
        assert first.evaluate("node => node.getBoundingClientRect().right <= innerWidth")


def test_versions_that_could_build_none_of_the_cases_have_no_column(browser: Any, tmp_path: pathlib.Path) -> None:
    skipped = pages.report_of("2.12.0", [pages.reports.result(case, "unsupported", "") for case in pages.CASES])
    ran = pages.report_of("2.13.0", pages.results_of("2.13.0"))
    write_page(tmp_path / "page.html", pages.merge({"skipped.json": skipped, "ran.json": ran}))
    for page in _opened(browser, (tmp_path / "page.html").as_uri(), *_WIDTHS["wide"], "light"):
        assert page.get_by_role("columnheader", name="torch").count() == 1


def test_a_report_that_answers_nothing_still_has_a_column(browser: Any, tmp_path: pathlib.Path) -> None:
    skipped = pages.report_of("2.12.0", [pages.reports.result(case, "unsupported", "") for case in pages.CASES])
    write_page(tmp_path / "page.html", pages.merge({"skipped.json": skipped}))
    for page in _opened(browser, (tmp_path / "page.html").as_uri(), *_WIDTHS["wide"], "light"):
        assert page.get_by_role("columnheader", name="torch 2.12.0").count() == 1


def test_the_direction_and_the_device_are_chosen_too(page: Any) -> None:
    assert page.get_by_role("columnheader", name="cuda").count() == 1
    page.get_by_label("Direction", exact=True).select_option("in")
    assert any("load" in row for row in _rows(page))
    page.get_by_label("Device", exact=True).select_option("emulated")
    assert page.get_by_role("columnheader", name="cuda").count() == 0
    assert page.get_by_role("columnheader", name="emulated").count() == 1


def test_what_fails_and_what_changed_can_be_shown_alone(page: Any) -> None:
    every = _rows(page)
    page.get_by_label("Show", exact=True).select_option("bad")
    failing = _rows(page)
    assert pages.KNOWN_CASE in failing
    assert set(failing) < set(every)
    for row in page.locator("#matrix tbody tr:has(td)").all():
        assert {"crash", "wrong", "hang"} & set(row.locator("button").all_text_contents())


def test_a_choice_is_in_the_address_and_comes_back_from_it(page: Any, address: str) -> None:
    page.get_by_label("Strategy", exact=True).select_option("fsdp1")
    page.get_by_label("Offload", exact=True).select_option("any")
    chosen, rows = page.url, page.locator("#count").text_content()
    page.goto("about:blank")
    page.goto(chosen)
    assert page.get_by_label("Strategy", exact=True).input_value() == "fsdp1"
    assert page.locator("#count").text_content() == rows


def test_a_cell_opens_verdict_message_cause_remedy_and_command(page: Any) -> None:
    page.get_by_role("button", name=f"crash: {pages.KNOWN_CASE}, {_ENVIRONMENT}").click()
    opened = page.get_by_role("dialog").text_content()
    for part in (
        "raised an exception",
        "torch 2.13.0, transformers 5.0.0, Python 3.12.1",
        pages.MESSAGE.format(device="emulated:0"),
        "Cause. model.to(device) runs FSDPModule._apply",
        "Remedy. ",
        f"fsdp-doctor probe --device emulated --nproc 2 --case '{pages.KNOWN_CASE}'",
    ):
        assert part in opened


def test_the_address_of_an_open_cell_is_a_link_to_it(page: Any) -> None:
    page.get_by_role("button", name=f"crash: {pages.KNOWN_CASE}, {_ENVIRONMENT}").click()
    link = page.url
    assert parse_qs(urlsplit(link).fragment)["case"] == [pages.KNOWN_CASE]
    text = page.get_by_role("dialog").text_content()
    page.goto("about:blank")
    page.goto(link)
    assert page.get_by_role("dialog").text_content() == text


def test_a_link_to_a_cell_shows_its_row_whatever_view_comes_first(page: Any, address: str) -> None:
    case = next(case.id for case in pages.CASES if case.scenario.strategy == "fsdp1")
    page.goto("about:blank")
    page.goto(address + _link(case))
    assert page.get_by_role("dialog").is_visible()
    assert case in _rows(page)


def test_a_link_to_a_case_without_staging_leaves_staging_open(page: Any, address: str) -> None:
    case = pages.FRAMEWORK_CASES[0].id
    page.goto("about:blank")
    page.goto(f"{address}{_link(case)}")
    assert case in page.get_by_role("dialog").text_content()
    page.keyboard.press("Escape")
    assert case in _rows(page)
    assert page.get_by_label("Staging", exact=True).input_value() == "any"


def test_a_link_to_what_is_not_there_opens_the_first_view(page: Any, address: str) -> None:
    first = _rows(page)
    for wrong in ("#case=nowhere&env=x", "#strategy=nothing", "#%", "#nowhere"):
        page.goto("about:blank")
        page.goto(address + wrong)
        assert _rows(page) == first


def test_a_message_of_another_device_leads_to_the_entry(page: Any) -> None:
    page.get_by_label("An error message, or words of it", exact=True).fill(
        f"[rank3]: {pages.MESSAGE.format(device='cuda:7')}"
    )
    page.locator("#results a").first.click()
    assert urlsplit(page.url).fragment == f"entry-{pages.KNOWN}"
    entry = page.locator(f"#entry-{pages.KNOWN}")
    assert entry.evaluate("node => node === document.activeElement")
    assert entry.evaluate("node => node.getBoundingClientRect().top < innerHeight")


def test_words_of_a_message_that_no_entry_has_lead_to_a_case(page: Any) -> None:
    page.get_by_label("An error message, or words of it", exact=True).fill("torch 2.13.0 does not like")
    page.locator("#results li").filter(has_text="does not like").first.locator("a").first.click()
    assert "does not like" in page.get_by_role("dialog").text_content()


def test_words_that_nothing_has_are_said_to_be_so(page: Any) -> None:
    page.get_by_label("An error message, or words of it", exact=True).fill("zzz unheard of qqq")
    assert "Nothing here has these words" in page.locator("#results").text_content()


def test_a_message_that_looks_like_html_is_text(page: Any, address: str) -> None:
    title = page.title()
    page.goto("about:blank")
    page.goto(address + _link(pages.HOSTILE_CASE))
    assert pages.HOSTILE in page.get_by_role("dialog").text_content()
    page.keyboard.press("Escape")
    page.get_by_label("An error message, or words of it", exact=True).fill("onerror document.title quoted")
    assert page.locator("#results li").count() > 0
    assert page.locator("img, #results b").count() == 0
    assert page.title() == title


def test_everything_in_the_matrix_can_be_done_by_keyboard(page: Any) -> None:
    page.locator("#matrix").focus()
    page.keyboard.press("Tab")
    focused = "[document.activeElement.dataset.case, document.activeElement.dataset.env]"
    first = page.evaluate(focused)
    assert first[0] == _rows(page)[0]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    case, anchor = page.evaluate(focused)
    assert (case, anchor) != tuple(first)
    assert case == _rows(page)[1]
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    assert page.evaluate(focused) == [case, anchor]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#matrix')") is None


def test_a_screen_reader_has_a_table_with_heads_and_cells_with_names(page: Any) -> None:
    table = page.get_by_role("table", name="Verdict of each method, by version of torch")
    assert table.get_by_role("columnheader").count() == 3
    assert table.get_by_role("rowheader", name="state_dict", exact=True).count() > 0
    unnamed = "nodes => nodes.filter(node => !node.ariaLabel && !node.textContent.trim()).length"
    assert page.eval_on_selector_all("button", unnamed) == 0
    unlabelled = "nodes => nodes.filter(node => !node.labels.length).length"
    assert page.eval_on_selector_all("input, select", unlabelled) == 0
    assert page.locator("[role=status]").count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3", "nodes => nodes.map(node => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


_CONTRAST = """
() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [red, green, blue] = channels(color).slice(0, 3).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [, , , alpha = 1] = channels(getComputedStyle(at).backgroundColor);
      if (alpha > 0) return getComputedStyle(at).backgroundColor;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || ["SCRIPT", "NOSCRIPT", "OPTION"].includes(node.tagName)) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    const name = `${node.tagName} ${node.className}`;
    found[name] = Math.min(found[name] || 99, (one + 0.05) / (other + 0.05));
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(browser: Any, address: str, scheme: str) -> None:
    for page in _opened(browser, address + _link(pages.KNOWN_CASE), *_WIDTHS["wide"], scheme):
        ratios = page.evaluate(_CONTRAST)
        assert len(ratios) > 20
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.skipif("FSDP_DOCTOR_AXE" not in os.environ, reason="FSDP_DOCTOR_AXE does not name axe.min.js")
@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fragment", ["", _link(pages.KNOWN_CASE)], ids=["matrix", "cell"])
def test_axe_finds_no_violation(browser: Any, address: str, width: str, scheme: str, fragment: str) -> None:
    axe = pathlib.Path(os.environ["FSDP_DOCTOR_AXE"]).read_text()
    for page in _opened(browser, address + fragment, *_WIDTHS[width], scheme):
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert found["passes"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []


@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(
    browser: Any, address: str, tmp_path: pathlib.Path, width: str, scheme: str
) -> None:
    kept = pathlib.Path(os.environ.get("FSDP_DOCTOR_SCREENSHOTS", tmp_path))
    for page in _opened(browser, address, *_WIDTHS[width], scheme):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=kept / f"{width}-{scheme}.png")
        page.get_by_role("button", name=f"crash: {pages.KNOWN_CASE}, {_ENVIRONMENT}").click()
        assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
        page.screenshot(path=kept / f"{width}-{scheme}-cell.png")


def test_of_ten_versions_every_case_of_the_default_matrix_can_be_shown(browser: Any, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ten.html"
    write_page(file, pages.merged_versions(*(f"2.{minor}.0" for minor in range(6, 16))))
    every = f"{file.as_uri()}#strategy=any&offload=any&staging=any&direction=any"
    for page in _opened(browser, every, *_WIDTHS["wide"], "light"):
        page.get_by_role("button", name="Show all").click()
        assert len(_rows(page)) == len(pages.CASES)
