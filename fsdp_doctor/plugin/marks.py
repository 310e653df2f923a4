"""What the marks of a test ask for: scenarios, ranks, a device. Reads no torch.

What a mark cannot mean is one sentence, and belongs to its test alone.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.matrix.axes import AXES, AXIS, Backend, check_axis_value, nearest
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.extent import product

_NAMED = ("strategy", "offload", "staging")
_OF_ANY_TEST = ("ranks", "device", "timeout")
_RANKS = 2
_FIXTURE = "fsdp_case"


@dataclass(frozen=True, kw_only=True)
class RanksNeeded:
    """What a test runs on. Tests that need the same run in the same workers.

    ranks: how many. device: as in ``--ranks-device``. backend: what the default process group is made with.
    """

    ranks: int
    device: str
    backend: Backend


@dataclass(frozen=True, kw_only=True)
class MarkedTest:
    """timeout: seconds that the test may go on without progress; None for what the probe allows a case."""

    needs: RanksNeeded
    timeout: float | None


def contract_of(function: object) -> Contract:
    """What ``fsdp_doctor.promises`` says of a test: of the weights that it checks, or of the checkpoint it is given."""
    contract: Contract = getattr(function, "contract", Contract())
    return contract


def parametrize(metafunc: pytest.Metafunc) -> None:
    """One test for each scenario. A mark that means none is left for :func:`read`, when its test is to run."""
    try:
        found = _scenarios(metafunc.definition)
    except UsageError:
        return
    values = [pytest.param(scenario, id=scenario.id, marks=_cannot_be(scenario)) for scenario in found]
    metafunc.parametrize(_FIXTURE, values, indirect=True)


def read(item: pytest.Item, device: str) -> MarkedTest:
    """What the marks of a test ask for. Raises UsageError for what they cannot mean.

    device: where the mark names none.
    """
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        raise UsageError(f"{item.name} is no test function: mark a function, or a method of a class of pytest's own")
    scenario = _scenario_of(item)
    values = _values_of_any_test(item)
    number, timeout = values.get("ranks", _RANKS), values.get("timeout")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{_said(item)}: the number of ranks is a positive whole number, not {number!r}")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"{_said(item)}: timeout is a positive number of seconds, not {timeout!r}")
    asked = values.get("device") or device
    if asked not in devices.NAMES:
        known = ", ".join(devices.NAMES)
        raise UsageError(f"{_said(item)}: unknown device {asked!r}; use one of {known}")
    backend = scenario.backend if scenario is not None else Backend.MIXED
    return MarkedTest(needs=RanksNeeded(ranks=number, device=asked, backend=backend), timeout=timeout)


def _scenario_of(item: pytest.Function) -> Scenario | None:
    """That of one of the tests that a mark became; None where no scenario is asked for."""
    if item.get_closest_marker("fsdp") is None:
        return None
    parameters: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if _FIXTURE not in parameters:
        _scenarios(item)
    scenario: Scenario = parameters[_FIXTURE]
    return scenario


def _values_of_any_test(item: pytest.Item) -> Mapping[str, Any]:
    if mark := item.get_closest_marker("fsdp"):
        return {name: mark.kwargs[name] for name in _OF_ANY_TEST if name in mark.kwargs}
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    values = dict(mark.kwargs)
    if "number" in values:
        values["ranks"] = values.pop("number")
    if mark.args:
        values["ranks"] = mark.args[0]
    unknown = [name for name in values if name not in _OF_ANY_TEST]
    if unknown or len(mark.args) > 1:
        what = f"{unknown[0]!r}" if unknown else "more than one number"
        raise UsageError(f"{_said(item)} takes a number of ranks, device= and timeout=, not {what}")
    return values


def _scenarios(node: pytest.Item) -> list[Scenario]:
    """Every combination of the values that are named; what is not named is at its default."""
    mark = node.get_closest_marker("fsdp")
    assert mark is not None
    if mark.args:
        raise UsageError(f"{_said(node)} takes the axes by name, as offload='policy', not {mark.args[0]!r} alone")
    if _FIXTURE not in getattr(node, "fixturenames", ()):
        raise UsageError(f"{node.name} is marked fsdp and has no argument {_FIXTURE}, through which it gets its model")
    axes = {name: value for name, value in mark.kwargs.items() if name not in _OF_ANY_TEST}
    chosen = {name: tuple(_values(node, name, value)) for name, value in axes.items()}
    direction = contract_of(getattr(node, "obj", None)).direction
    return list(product(direction, {name: (AXIS[name].default,) for name in _NAMED} | chosen))


def _values(node: pytest.Item, axis: str, value: Any) -> Iterable[str]:
    if axis not in AXIS:
        known = [axis.name for axis in AXES] + list(_OF_ANY_TEST)
        raise UsageError(
            f"{_said(node)}: there is no axis {axis!r}{nearest(axis, known)}; use one of {', '.join(known)}"
        )
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{_said(node)}: {axis} is a value of the axis, several of them, or 'all', not {value!r}")
    if words in (["all"], ("all",)):
        return [word for word in AXIS[axis].values if not _reason_against(word)]
    for word in words:
        try:
            check_axis_value(axis, word)
        except UsageError as error:
            raise UsageError(f"{_said(node)}: {str(error).removeprefix('--')}") from None
        if reason := _reason_against(word):
            raise UsageError(f"{_said(node)}: {axis} {word!r} is not for tests: {reason}")
    return words


def _reason_against(value: str) -> str:
    """Why no test can have the value; empty if one can."""
    if value == "custom":
        return "a test that has a model of its own is marked ranks"
    if value in ("other-run", "other-world"):
        return "the probe alone has other processes that save"
    if value in ("no_grad", "inference"):
        return "the test itself enters torch.no_grad() or torch.inference_mode()"
    return ""


def _cannot_be(scenario: Scenario) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.skip(reason=f"unsupported: {scenario.contradiction}"),) if scenario.contradiction else ()


def _said(node: pytest.Item) -> str:
    return "@pytest.mark.fsdp" if node.get_closest_marker("fsdp") else "@pytest.mark.ranks"
