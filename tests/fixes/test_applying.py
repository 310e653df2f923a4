"""Tests which functions are replaced and which are refused, on a framework of three lines."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.fixes import FrameworkFix, apply, applying, entry

_SOURCE = """class Sender:
    def send(self, weights, quantized=False):
        return [weights, quantized]
"""
_FUNCTION = "".join(_SOURCE.splitlines(keepends=True)[1:])
_FIX = FrameworkFix(
    id="toy-sender",
    framework="toyframework",
    distribution="toyframework",
    target="toyframework:Sender.send",
    versions=">=1,<2",
    sources={hashlib.sha256(_FUNCTION.encode()).hexdigest(): "1.0"},
    mends=(),
    cures=(),
    promises="twice the weights",
    leaves="quantized ones",
    replacement=f"{__name__}:send_twice",
)


def send_twice(original: Any, sender: Any, weights: int, quantized: bool = False) -> Any:
    if quantized:
        return applying.fall_back("quantized weights", original, sender, weights, quantized=quantized)
    return 2 * weights


_FUNCTION_SOURCE = """def send(weights, quantized=False):
    return [weights, quantized]
"""
_FIX_OF_FUNCTION = dataclasses.replace(
    _FIX,
    id="toy-function",
    target="toyframework:send",
    sources={hashlib.sha256(_FUNCTION_SOURCE.encode()).hexdigest(): "1.0"},
    replacement=f"{__name__}:send_twice_alone",
)


def send_twice_alone(original: Any, weights: int, quantized: bool = False) -> Any:
    return 2 * weights


class Toy:
    """An installation of the framework, not imported yet."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def install(self, source: str = _SOURCE, version: str = "1.0") -> None:
        (self._directory / "toyframework.py").write_text(source)
        info = self._directory / f"toyframework-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toyframework\nVersion: {version}\n")
        importlib.invalidate_caches()

    def load(self) -> ModuleType:
        return importlib.import_module("toyframework")


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(entry, "FIXES", (_FIX,))
    monkeypatch.setattr(applying, "_applied", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Toy(tmp_path)
    sys.modules.pop("toyframework", None)


def test_a_known_function_is_replaced_and_its_calls_are_counted(toy: Toy) -> None:
    toy.install()
    (applied,) = apply("toyframework")
    assert applied.version == "1.0"
    sender = toy.load().Sender()
    assert [sender.send(1), sender.send(weights=2)] == [2, 4]
    assert (applied.num_calls, applied.num_left) == (2, 0)


def test_what_a_replacement_leaves_is_answered_by_the_original(toy: Toy) -> None:
    toy.install()
    (applied,) = apply("toyframework")
    assert toy.load().Sender().send(1, quantized=True) == [1, True]
    assert (applied.num_calls, applied.num_left) == (1, 1)


def test_a_process_says_once_each_that_it_replaced_called_and_left(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.install()
    apply("toyframework")
    assert len(capsys.readouterr().err.splitlines()) == 1
    for _ in range(2):
        toy.load().Sender().send(1, quantized=True)
    called, left = capsys.readouterr().err.splitlines()
    assert "toy-sender" in called
    assert "quantized weights" in left


def test_applying_twice_replaces_once(toy: Toy) -> None:
    toy.install()
    first = apply("toyframework")
    replaced = toy.load().Sender.send
    assert apply("toyframework") == first
    assert toy.load().Sender.send is replaced


@pytest.fixture
def user(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that imports the framework's function by name, under a name of its own."""
    monkeypatch.setattr(entry, "FIXES", (_FIX_OF_FUNCTION,))
    toy.install(_FUNCTION_SOURCE)
    user = sys.modules["toyuser"] = ModuleType("toyuser")
    user.give = toy.load().send  # type: ignore[attr-defined]
    yield user
    del sys.modules["toyuser"]


def test_a_function_is_replaced_in_modules_that_have_imported_it(toy: Toy, user: Any) -> None:
    (applied,) = apply("toyframework")
    assert (toy.load().send(1), user.give(2)) == (2, 4)
    assert applied.num_calls == 2


def test_a_function_that_is_put_back_is_so_in_every_module(toy: Toy, user: Any) -> None:
    original = user.give
    with applying.hold_fix("toy-function"):
        user.later = toy.load().send
        assert user.later(1) == 2
    assert (toy.load().send, user.give, user.later) == (original,) * 3


@pytest.mark.parametrize(
    "hold",
    [lambda send: [send], lambda send: functools.partial(send, 1), lambda send: type("Mine", (), {"send": send})],
    ids=["list", "partial", "class"],
)
def test_a_function_that_another_object_holds_is_refused(user: Any, hold: Any) -> None:
    user.holder = hold(user.give)
    with pytest.raises(CannotRun, match="already held by"):
        apply("toyframework")
    assert applying._applied == {}


_STATIC = """class Sender:
    @staticmethod
    def send(weights):
        return [weights]
"""


def test_a_static_method_stays_one(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "".join(_STATIC.splitlines(keepends=True)[1:])
    known = {hashlib.sha256(function.encode()).hexdigest(): "1.0"}
    fix = dataclasses.replace(_FIX, sources=known, replacement=f"{__name__}:send_twice_alone")
    monkeypatch.setattr(entry, "FIXES", (fix,))
    toy.install(_STATIC)
    with applying.hold_fix(fix.id):
        assert (toy.load().Sender.send(1), toy.load().Sender().send(2)) == (2, 4)
    assert toy.load().Sender().send(2) == [2]


_DECORATED = """@torch.no_grad()
def send(weights):
    return [weights]
"""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_function_under_a_decorator_of_torch_is_known_unless_wrapped_again(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    known = {hashlib.sha256(_DECORATED.encode()).hexdigest(): "1.0"}
    fix = dataclasses.replace(_FIX_OF_FUNCTION, sources=known)
    monkeypatch.setattr(entry, "FIXES", (fix,))
    toy.install(f"import torch\n\n\n{_DECORATED}")
    original = toy.load().send
    if is_replaced:
        toy.load().send = functools.wraps(original)(lambda weights: [weights])
        with pytest.raises(CannotRun, match="already replaced"):
            apply("toyframework")
        return
    with applying.hold_fix(fix.id):
        assert toy.load().send(1) == 2
    assert toy.load().send is original


def _changes_source(toy: Toy) -> str:
    toy.install(_SOURCE.replace("[weights", "[-weights"))
    return "sha256"


def _is_too_new(toy: Toy) -> str:
    toy.install(version="2.0")
    return "toyframework 2.0"


def _is_not_installed(toy: Toy) -> str:
    return "not installed"


def _lost_the_function(toy: Toy) -> str:
    toy.install("class Sender: pass\n")
    return "toyframework:Sender.send"


def _is_replaced_by_another(toy: Toy) -> str:
    toy.install()
    toy.load().Sender.send = lambda self, weights: weights
    return pathlib.Path(__file__).name


def _is_overridden(toy: Toy) -> str:
    toy.install()
    # It lives as long as the module, which refers to it.
    toy.load().mine = type("MySender", (toy.load().Sender,), {"send": lambda self, weights: weights})  # type: ignore[attr-defined]
    return "MySender"


@pytest.mark.parametrize(
    "prepare",
    [_changes_source, _is_too_new, _is_not_installed, _lost_the_function, _is_replaced_by_another, _is_overridden],
)
def test_what_is_not_known_is_refused_by_name(toy: Toy, prepare: Any) -> None:
    name = prepare(toy)
    with pytest.raises(CannotRun, match=name):
        apply("toyframework")
    assert applying._applied == {}


def test_a_framework_without_fixes_is_a_usage_error(toy: Toy) -> None:
    with pytest.raises(UsageError, match="toyframework"):
        apply("megatron")
