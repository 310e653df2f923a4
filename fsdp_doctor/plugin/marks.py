"""Reads the marks of a test: the scenarios, the number of ranks and the device that they name. Imports no torch.

An invalid mark fails only its own test, with a message of one sentence.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.matrix.axes import (
    AXES,
    AXIS,
    Backend,
    CheckpointFit,
    Consumer,
    Context,
    Model,
    check_axis_value,
    describe_nearest,
    parse_value,
)
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.extent import list_product

_NAMED = ("strategy", "offload", "staging")
_OF_ANY_TEST = ("ranks", "device", "timeout")
_RANKS = 2
_FIXTURE = "fsdp_case"


@dataclass(frozen=True, kw_only=True)
class RanksNeeded:
    """The ranks that a test runs on. Tests that need the same ranks run in the same workers.

    ranks: the number of ranks.
    device: a value of ``--ranks-device``.
    backend: the backend of the default process group.
    """

    ranks: int
    device: str
    backend: Backend


@dataclass(frozen=True, kw_only=True)
class MarkedTest:
    """The ranks and the time limit of a marked test.

    timeout: seconds that the test may take without progress; None for the deadline of a probe's case.
    """

    needs: RanksNeeded
    timeout: float | None


def read_contract(function: object) -> Contract:
    """Returns the contract that ``fsdp_doctor.promises`` gave the test, or the default contract."""
    contract: Contract = getattr(function, "contract", Contract())
    return contract


def parametrize_scenarios(metafunc: pytest.Metafunc) -> None:
    """Makes one test for each scenario that the test's mark names.

    An invalid mark is ignored here, and refused by :func:`read` when its test runs.
    """
    try:
        scenarios = _list_scenarios(metafunc.definition)
    except UsageError:
        return
    values = []
    for scenario in scenarios:
        why_not = scenario.contradiction
        marks = (pytest.mark.skip(reason=f"unsupported: {why_not}"),) if why_not else ()
        values.append(pytest.param(scenario, id=scenario.id, marks=marks))
    metafunc.parametrize(_FIXTURE, values, indirect=True)


def read(item: pytest.Item, device: str) -> MarkedTest:
    """Reads the marks of a test. Raises UsageError for an invalid mark.

    device: the device to use if the mark names no device.
    """
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        raise UsageError(f"{item.name} is not a test function: mark a function, or a method of a plain pytest class")
    scenario = _find_scenario(item)
    values = _read_values_of_any_test(item)
    number, timeout = values.get("ranks", _RANKS), values.get("timeout")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{_mark(item)}: the number of ranks must be a positive whole number, not {number!r}")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"{_mark(item)}: timeout is a positive number of seconds, not {timeout!r}")
    device_name = values.get("device") or device
    if device_name not in devices.NAMES:
        known = ", ".join(devices.NAMES)
        raise UsageError(f"{_mark(item)}: unknown device {device_name!r}; use one of {known}")
    backend = scenario.backend if scenario is not None else Backend.MIXED
    return MarkedTest(needs=RanksNeeded(ranks=number, device=device_name, backend=backend), timeout=timeout)


def _find_scenario(item: pytest.Function) -> Scenario | None:
    """Returns the scenario for which pytest made this test from its mark; None for a test without a scenario."""
    if item.get_closest_marker("fsdp") is None:
        return None
    parameters: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if _FIXTURE not in parameters:
        _list_scenarios(item)
    scenario: Scenario = parameters[_FIXTURE]
    return scenario


def _read_values_of_any_test(item: pytest.Item) -> Mapping[str, Any]:
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
        raise UsageError(f"{_mark(item)} takes a number of ranks, device= and timeout=, not {what}")
    return values


def _list_scenarios(node: pytest.Item) -> list[Scenario]:
    """Lists every combination of the values that the mark names. The other axes have their defaults.

    Raises UsageError for an invalid mark.
    """
    mark = node.get_closest_marker("fsdp")
    assert mark is not None
    if mark.args:
        raise UsageError(f"{_mark(node)} takes the axes by name, as offload='policy', not {mark.args[0]!r} alone")
    if _FIXTURE not in getattr(node, "fixturenames", ()):
        raise UsageError(f"{node.name} is marked fsdp, but has no argument {_FIXTURE}, which provides its model")
    axes = {name: value for name, value in mark.kwargs.items() if name not in _OF_ANY_TEST}
    chosen = {name: tuple(_list_values(node, name, value)) for name, value in axes.items()}
    direction = read_contract(getattr(node, "obj", None)).direction
    return list(list_product(direction, {name: (AXIS[name].default,) for name in _NAMED} | chosen))


def _list_values(node: pytest.Item, axis: str, value: Any) -> Iterable[str]:
    if axis not in AXIS:
        known = [axis.name for axis in AXES] + list(_OF_ANY_TEST)
        raise UsageError(
            f"{_mark(node)}: there is no axis {axis!r}{describe_nearest(axis, known)}; use one of {', '.join(known)}"
        )
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{_mark(node)}: {axis} is a value of the axis, several of them, or 'all', not {value!r}")
    if words in (["all"], ("all",)):
        return [word for word in AXIS[axis].values if not _explain_impossible(axis, word)]
    for word in words:
        try:
            check_axis_value(axis, word)
        except UsageError as error:
            raise UsageError(f"{_mark(node)}: {str(error).removeprefix('--')}") from None
        if reason := _explain_impossible(axis, word):
            raise UsageError(f"{_mark(node)}: {axis} {word!r} is not for tests: {reason}")
    return words


def _explain_impossible(axis: str, value: str) -> str:
    """Explains why no test can have this value of an axis; empty if a test can have it."""
    match parse_value(axis, value):
        case Model.CUSTOM:
            return "a test that builds its own model is marked ranks"
        case CheckpointFit.OTHER_RUN | CheckpointFit.OTHER_WORLD | CheckpointFit.HUB:
            return "the checkpoint is saved by other processes, which only the probe starts"
        case Consumer() as consumer if consumer.needs_sender:
            return "a test uses the extracted weights itself, without a consumer"
        case Context.NO_GRAD | Context.INFERENCE:
            return "the test itself enters torch.no_grad() or torch.inference_mode()"
        case _:
            return ""


def _mark(node: pytest.Item) -> str:
    return "@pytest.mark.fsdp" if node.get_closest_marker("fsdp") else "@pytest.mark.ranks"
