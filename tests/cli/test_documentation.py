"""The documentation names what there is: options, verdicts, exit codes, axes, files, and no others."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import get_args

import pytest
import typer
from support.rooms import EMULATED, ROOMS

from fsdp_doctor import errors
from fsdp_doctor.cli.app import app
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.selection import Selection, select
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
_COMMAND = re.compile(r"fsdp[-_]doctor +((?:memory +)?[a-z]+)")
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")
_OF_ANOTHER_PROGRAM = re.compile(r"^(?:torchrun|pip|git|make|python3?|apt|kubectl)\b")


def _options_of_commands() -> dict[str, set[str]]:
    """What ``--help`` of each command lists, but for itself; of a group, each of its commands by both words."""
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
            own, _, of_probe = part[command.end() :].partition(" -- ")
            yield from ((command[1], option) for option in _OPTION.findall(own))
            yield from (("probe", option) for option in _OPTION.findall(of_probe))
        elif not command and not _OF_ANOTHER_PROGRAM.match(part):
            yield from (("", option) for option in _OPTION.findall(part))


@pytest.mark.parametrize("command", OPTIONS)
def test_the_page_of_a_command_names_exactly_its_options(command: str) -> None:
    page = ROOT / "docs" / "commands" / f"{command.replace(' ', '-')}.md"
    named = {option for of, option in _options_named(page) if of in ("", command)}
    assert named == OPTIONS[command]


@pytest.mark.parametrize("page", PAGES, ids=_title)
def test_every_command_line_in_the_documentation_uses_options_that_there_are(page: pathlib.Path) -> None:
    unknown = {
        (command, option) for command, option in _options_named(page) if command and option not in OPTIONS[command]
    }
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=_title)
def test_every_link_to_a_file_and_every_file_of_ours_that_is_named_is_there(page: pathlib.Path) -> None:
    links = [(target, anchor) for target, anchor in _LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    for target, anchor in links:
        if anchor:
            assert anchor in _anchors((page.parent / target).read_text()), (target, anchor)
    named = {
        piece.split(":")[0]
        for piece in _pieces_of_code(page)
        if re.match(r"(?:fsdp_doctor|docs|tests|examples)/[\w./*-]+$", piece)
    }
    assert [name for name in named if not any(ROOT.glob(name.rstrip("/")))] == []


def _anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def _first_column(page: str, header: str) -> list[str]:
    table = (ROOT / "docs" / page).read_text().split(header, 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `?([\w]+)`? \|", table, re.MULTILINE)


def test_the_verdicts_are_explained_each_once() -> None:
    assert sorted(_first_column("verdicts.md", "| verdict | meaning |")) == sorted(get_args(VerdictKind))


def test_the_exit_codes_are_explained_each_once() -> None:
    ends = {end.exit_code for end in vars(errors).values() if isinstance(end, type) and issubclass(end, Exception)}
    codes = {errors.EXIT_OK, errors.EXIT_BAD_VERDICT, *ends}
    assert [int(code) for code in _first_column("verdicts.md", "| exit code | meaning |")] == sorted(codes)


def test_the_axes_and_their_values_are_explained() -> None:
    text = (ROOT / "docs" / "matrix.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", text.split("| axis |", 1)[1], re.MULTILINE))
    assert list(rows) == [axis.name for axis in AXES]
    for axis in AXES:
        combined = {value for value in axis.values if value.startswith("policy+")}
        assert {value for value in axis.values if f"`{value}`" not in rows[axis.name]} == combined


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("level", get_args(Level))
def test_the_sizes_of_the_matrix_are_as_they_are_selected(level: Level) -> None:
    cases = select(Selection(level=level))
    size = f"{len(cases):,} cases in {len({case.scenario for case in cases})} scenarios"
    assert size in " ".join((ROOT / "docs" / "matrix.md").read_text().split())


@pytest.mark.parametrize("page", ["README.md", "docs/commands/probe.md"])
def test_the_last_line_of_make_probe_adds_up_to_the_default_matrix(page: str) -> None:
    [(total, *parts)] = re.findall(
        r"`(\d+) cases: (\d+) ok, (\d+) as torch [\d.]+ is known to fail, (\d+) unforeseen`", (ROOT / page).read_text()
    )
    assert int(total) == sum(map(int, parts)) == len(select(Selection()))


def test_contributing_has_a_line_for_every_room_in_their_order() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| room | what is in it |", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*ROOMS, EMULATED]
