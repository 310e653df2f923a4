"""The recipes of CONTRIBUTING.md: a step that was forgotten fails here, with the file that has to be changed.

Steps that mypy asks for, at the ``match`` over an enum, are not repeated.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.damages import DAMAGES
from support.places import ROOT

from fsdp_doctor.case.built_scenario import derive_facts
from fsdp_doctor.check.framework import FsdpFramework
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.checkpoints import checks
from fsdp_doctor.checkpoints.formats import OTHER_FORMATS
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.matrix.axes import AXES, Offload, OffloadFlag
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.plan.configured_job import PlanKeys
from fsdp_doctor.report.formats import FORMATS
from fsdp_doctor.weights.fsdp import private

_DOCS = ROOT / "docs"
_TABLES = ROOT / "fsdp_doctor" / "check" / "frameworks"
# No model shows a value of these: they are of the file of a load, of the context of a call, and of a receiver.
_WITHOUT_FACTS = ("checkpoint", "context", "consumer")


def _read_page(name: str) -> str:
    return (_DOCS / name).read_text(encoding="utf-8")


def _list_rows(page: str, header: str) -> list[str]:
    """The first cell of each row of the table under that header, without backticks."""
    table = _read_page(page).split(f"{header}\n", 1)[1].split("\n\n", 1)[0]
    return [row.split("|")[1].strip().strip("`") for row in table.splitlines()[1:]]


# Add a value to an axis.


def test_a_model_shows_each_value_of_an_axis_by_a_fact() -> None:
    scenarios = {case.scenario for case in select(Selection(level="full")) if isinstance(case.scenario, Scenario)}
    axes = [axis for axis in AXES if axis.name not in _WITHOUT_FACTS]
    missing = {(axis.name, value) for axis in axes for value in axis.values if value not in (axis.default, "custom")}
    for scenario in scenarios:
        for axis in axes:
            value = scenario.values[axis.name]
            if (axis.name, value) in missing:
                facts, without = (
                    derive_facts(each, device="cuda", ranks=4)
                    for each in (scenario, scenario.change(**{axis.name: axis.default}))
                )
                missing -= {(axis.name, value)} if facts != without else set()
    assert missing == set(), (
        "matrix/extent.py has no scenario with these values, or case/built_scenario.py no fact that follows from them"
    )


def test_every_offload_flag_can_be_set_by_its_name() -> None:
    keywords = inspect.signature(Offload.from_flags).parameters
    assert list(keywords) == list(map(str, OffloadFlag)), "matrix/axes.py: the keywords of Offload.from_flags"
    for flag in OffloadFlag:
        assert Offload.from_flags(**{str(flag): True}) == Offload((flag,)), f"matrix/axes.py: from_flags of {flag}"


# Add a framework to `check`.


@pytest.mark.parametrize("kind", FRAMEWORKS, ids=lambda kind: kind.facts.name)
def test_the_class_of_every_framework_can_be_made(kind: type[Any]) -> None:
    missing = ", ".join(sorted(kind.__abstractmethods__))
    assert not missing, f"{inspect.getsourcefile(kind)}: {kind.__name__} lacks {missing}"


@pytest.mark.parametrize("kind", FRAMEWORKS, ids=lambda kind: kind.facts.name)
def test_every_role_of_a_table_is_a_model_that_check_reads(kind: type[Any]) -> None:
    """A configuration has all keys of the role; if ``list_models`` leaves it out, nothing seems to fail in it."""
    for name, table in kind.facts.models.items():
        keys = (*table.path, *(f"{section}.{word}" for section in table.sections for word in ("enabled", "strategy")))
        settings = Settings.from_rows(Setting(key, "a value", "a test") for key in keys)
        role, framework = getattr(table, "role", name), kind(settings)
        is_read = role in framework.list_models() and framework.list_keys(role) is table
        assert is_read, f"{inspect.getsourcefile(kind)}: {kind.__name__} never reads [models.{name}] of its table"


def test_every_table_beside_the_classes_is_of_a_framework() -> None:
    tables = {msgspec.toml.decode(file.read_bytes())["name"] for file in _TABLES.glob("*.toml")}
    assert tables - {kind.facts.name for kind in FRAMEWORKS} == set(), "check/frameworks/__init__.py: FRAMEWORKS"


def test_every_table_of_a_framework_says_what_a_plan_reads() -> None:
    for file in sorted(_TABLES.glob("*.toml")):
        table = msgspec.toml.decode(file.read_bytes())
        assert "plan" in table, (
            f"{file}: the part `plan` is missing; {{}} if all of it is as for Hugging Face's trainers"
        )
        sizes = msgspec.convert(table["plan"], PlanKeys).sizes
        roles = {model.get("role", name) for name, model in table.get("models", {}).items()}
        assert not sizes or "any" in sizes or roles <= sizes.keys(), f"{file}: plan.sizes lacks a role"


def test_the_page_of_check_has_a_row_for_every_framework() -> None:
    rows = [name for row in _list_rows("commands/check.md", "| framework | what is read |") for name in row.split(", ")]
    under_fsdp = [kind.facts.name for kind in FRAMEWORKS if issubclass(kind, FsdpFramework)]
    assert sorted(rows) == sorted(name for names in under_fsdp for name in names.split(" or ")), (
        "docs/commands/check.md"
    )
    others = [kind.facts.name for kind in FRAMEWORKS if not issubclass(kind, FsdpFramework)]
    page = _read_page("commands/check.md")
    assert [name for name in others if name not in page] == [], "docs/commands/check.md, below the table"


# Add a framework whose own code is run.


def test_the_page_of_frameworks_has_a_row_for_every_adapter() -> None:
    rows = _list_rows("frameworks.md", "| framework | what is tried |")
    assert sorted(rows) == sorted(BUILT_IN), "docs/frameworks.md, against fsdp_doctor/frameworks/on_*.toml"


# Add a check of checkpoints.


def _list_check_functions() -> Iterator[tuple[str, Any]]:
    """The module's name and the function, of each public one that yields symptoms."""
    for found in pkgutil.iter_modules(checks.__path__):
        module = importlib.import_module(f"{checks.__name__}.{found.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_check = function.__annotations__.get("return") == "Iterator[Symptom]"
            if function.__module__ == module.__name__ and is_check and not name.startswith("_"):
                yield found.name, function


def test_every_check_of_checkpoints_is_called() -> None:
    called = {*checks.CHECKS, *checks.CHECKS_OF_ALL, checks.find_missing_from_part}
    found = list(_list_check_functions())
    assert called <= {function for _, function in found}
    forgotten = [f"{function.__name__} of {module}.py" for module, function in found if function not in called]
    assert forgotten == [], "checkpoints/checks/__init__.py: they stand in none of its tables"


def test_every_kind_of_damage_is_planted() -> None:
    # Only `--base` finds a model that was never trained; tests/checkpoints/test_diff.py tests it.
    planted = {trouble.upper() for _, _, trouble in DAMAGES.values()} | {"UNTRAINED"}
    damages = {trouble.name for trouble in Trouble if trouble.value.severity == "damage"}
    assert sorted(damages - planted) == [], "tests/support/damages.py: DAMAGES has no row of these kinds"


def test_the_page_of_verify_names_every_format_that_is_not_read() -> None:
    page = " ".join(_read_page("commands/checkpoint-verify.md").replace("`", "").split()).lower()
    missing = [each.name for each in OTHER_FORMATS if each.name.lower() not in page]
    assert missing == [], "docs/commands/checkpoint-verify.md, below its tables"


# Add a report format.


@pytest.mark.parametrize("page", ["commands/probe.md", "commands/report-show.md"])
def test_the_row_of_format_names_every_format(page: str) -> None:
    (row,) = [line for line in _read_page(page).splitlines() if line.startswith("| `--format` |")]
    assert set(re.findall(r"`(\w+)`", row)) - {"auto"} == set(FORMATS), f"docs/{page}, the row of --format"


# Add a method, or a value to an axis: the numbers of cases that are written by hand.


_LEVELS: tuple[Level, ...] = ("quick", "default", "full")


def _read_numbers(text: str, unit: str) -> list[int]:
    """The numbers that stand before a unit: cases, or scenarios."""
    return [int(number.replace(",", "")) for number in re.findall(rf"([\d,]+) {unit}\b", text)]


def test_the_numbers_of_cases_in_the_documentation_are_right() -> None:
    written = []
    for level in _LEVELS:
        (row,) = [line for line in _read_page("matrix.md").splitlines() if line.startswith(f"| `--level {level}`")]
        cases = select(Selection(level=level))
        counts = {"cases": len(cases), "scenarios": len({case.scenario for case in cases})}
        counts["of the cases extract"] = len(select(Selection(level=level, directions=("out",))))
        for unit, count in counts.items():
            for number in _read_numbers(row, unit):
                assert abs(number - count) <= count / 40, f"docs/matrix.md: --level {level} has {count} {unit}"
        written += _read_numbers(row, "cases")
    assert len(written) == len(_LEVELS)
    for name in ("README.md", "docs/commands/probe.md", "fsdp_doctor/cli/selection.py"):
        text = re.sub(r'"\s+"', "", (ROOT / name).read_text(encoding="utf-8"))
        copied = re.findall(r"(?:about|quick` \(|quick \(|this machine:) ([\d,]+ cases)", text)
        numbers = _read_numbers(" ".join(copied), "cases")
        assert numbers, f"{name} has no number of cases"
        assert set(numbers) <= set(written), f"{name}: numbers of cases other than those in docs/matrix.md"


# Add a torch version: the names that are private.


def test_every_function_on_private_names_is_used() -> None:
    """Names each function that nothing in the package calls: it is tried by no test of what would use it."""
    home = pathlib.Path(private.__file__).parent
    functions = {
        name: file.name
        for file in home.glob("*.py")
        for name in re.findall(r"^def ([a-z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    others = [file for file in (ROOT / "fsdp_doctor").rglob("*.py") if file.parent != home]
    words = {word for file in others for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    assert len(functions) > 30
    assert {name: file for name, file in functions.items() if name not in words} == {}, "weights/fsdp/private"
