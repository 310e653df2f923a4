"""The documentation names what there is: options, verdicts, exit codes, axes, files, and no others."""

from __future__ import annotations

import collections
import pathlib
import re
import runpy
from collections.abc import Iterator
from typing import get_args

import pytest
import typer
import yaml
from support.rooms import EMULATED, ROOMS

import fsdp_doctor
from fsdp_doctor import errors
from fsdp_doctor.cli.app import app
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.verdict.classification import VerdictKind

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "fsdp_doctor/emulated/README.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
_OPTION = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[a-z])(?![\w-])")
# Whatever starts it, torchrun with its own options among them.
_COMMAND = re.compile(r"fsdp[-_]doctor +((?:(?:memory|report|checkpoint) +)?[a-z]+)")
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_OF_ANOTHER_PROGRAM = re.compile(r"^(?:torchrun|pip|git|make|python3?|apt|kubectl|py-spy)\b")


def _options_of_commands() -> dict[str, set[str]]:
    """Returns what ``--help`` of each command lists, but for itself; of a group, each of its commands by both words."""
    commands = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        within = getattr(command, "commands", {})
        commands |= {f"{name} {inner}": each for inner, each in within.items()} or {name: command}
    return {
        name: {
            option for parameter in command.params if parameter.param_type_name == "option" for option in parameter.opts
        }
        - {"--help"}
        for name, command in commands.items()
    }


OPTIONS = _options_of_commands()


def _title(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def _pieces_of_code(page: pathlib.Path) -> Iterator[str]:
    """Each line of a block of code, without its comment, and each piece of code within a text."""
    text = page.read_text()
    for block in _FENCE.findall(text):
        yield from (line.split("  #")[0].split(" # ")[0].strip() for line in block.splitlines())
    yield from (piece.replace("\n", " ") for piece in _INLINE.findall(_FENCE.sub("", text)))


def _options_named(page: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(command, option) for each option that the page names; the command is empty where the page does not say it."""
    for part in (part.strip() for piece in _pieces_of_code(page) for part in piece.split("|")):
        command = _COMMAND.search(part)
        if command and command[1] in OPTIONS:
            own, _, behind = part[command.end() :].partition(" -- ")
            yield from ((command[1], option) for option in _OPTION.findall(own))
            # Behind it the sweep has options of the probe; others have another program.
            of_probe = behind if command[1] == "report sweep" else ""
            yield from (("probe", option) for option in _OPTION.findall(of_probe))
        elif not command and not _OF_ANOTHER_PROGRAM.match(part):
            yield from (("", option) for option in _OPTION.findall(part))


@pytest.mark.parametrize("command", OPTIONS)
def test_the_page_of_a_command_names_exactly_its_options(command: str) -> None:
    page = ROOT / "docs" / "commands" / f"{command.replace(' ', '-')}.md"
    named = {option for of, option in _options_named(page) if of in ("", command)}
    assert named == OPTIONS[command]


def test_every_command_line_in_the_documentation_uses_options_that_there_are() -> None:
    used = ((_title(page), command, option) for page in PAGES for command, option in _options_named(page) if command)
    assert [each for each in used if each[2] not in OPTIONS[each[1]]] == []


def test_every_file_of_ours_that_is_named_is_there() -> None:
    pieces = ((_title(page), piece.split(":")[0]) for page in PAGES for piece in _pieces_of_code(page))
    named = {each for each in pieces if re.match(r"(?:fsdp_doctor|docs|tests|examples)/[\w./*-]+$", each[1])}
    assert [each for each in named if not any(ROOT.glob(each[1].rstrip("/")))] == []


def _all_markdown() -> list[pathlib.Path]:
    """Lists the Markdown of the checkout, without what is built or installed in it."""
    pages = (page.relative_to(ROOT) for page in ROOT.rglob("*.md"))
    return [
        ROOT / page for page in pages if not page.parts[0].startswith(".") and page.parts[0] not in ("build", "dist")
    ]


def test_every_relative_link_leads_to_an_existing_file_and_heading() -> None:
    broken = []
    for page in _all_markdown():
        for target, anchor in _LINK.findall(_FENCE.sub("", page.read_text())):
            file = page.parent / target if target else page
            if "://" in target or target.startswith("mailto:"):
                continue
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text())):
                broken.append(f"{_title(page)}: {target}#{anchor}")
    assert broken == []


def _anchors(text: str) -> set[str]:
    """Makes anchors of headings as GitHub does: the second of the same name ends in -1."""
    seen: collections.Counter[str] = collections.Counter()
    anchors = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def test_every_page_of_the_documentation_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = dict.fromkeys((ROOT / "docs").rglob("*.md"), 0)
    for pattern in _leaves(site["nav"]):
        for page in (ROOT / "docs").glob(pattern):
            pages[page] += 1
    assert {_title(page): count for page, count in pages.items() if count != 1} == {}


def _leaves(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:  # type: ignore[attr-defined]
            yield from _leaves(inner)


def test_the_api_page_has_every_public_name_once() -> None:
    listed = re.findall(r"^::: fsdp_doctor\.(.*)\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    of_engines = sorted(name for room, name in listed if room == "weights.engines")
    others = sorted(name for room, name in listed if room != "weights.engines")
    assert of_engines == sorted(fsdp_doctor.engines.__all__)
    assert others == sorted({*fsdp_doctor.__all__} - {"__version__", "engines"})


def _first_column(page: str, header: str) -> list[str]:
    table = (ROOT / "docs" / page).read_text().split(header, 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `?([\w]+)`? \|", table, re.MULTILINE)


def test_the_verdicts_are_explained_each_once() -> None:
    assert sorted(_first_column("verdicts.md", "| verdict | meaning |")) == sorted(get_args(VerdictKind))


def test_the_exit_codes_are_explained_each_once() -> None:
    ends = {end.exit_code for end in vars(errors).values() if isinstance(end, type) and issubclass(end, Exception)}
    codes = {errors.EXIT_OK, errors.EXIT_BAD_VERDICT, *ends}
    assert [int(code) for code in _first_column("verdicts.md", "| exit code | meaning |")] == sorted(codes)


def test_the_tables_of_axes_and_methods_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "matrix.md").read_text()
    fill_tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))["fill_tables"]
    assert fill_tables(page) == page, "run: python docs/tables.py"
    assert all(f"| `{value}` |" in page for axis in AXES for value in axis.values)


def test_the_readme_has_80_lines_and_20_links_at_most() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (len(readme.splitlines()) <= 80, len(_LINK.findall(readme)) <= 20) == (True, True)


def test_contributing_has_a_line_for_every_room_in_their_order() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| room | what is in it |", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*ROOMS, EMULATED]
