"""Tests of imports in a process that forks others: garbage collection, and CUDA, which stays without a context."""

from __future__ import annotations

import functools
import gc
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from fsdp_doctor.machine import imports

_SOURCE = "made = [[] for _ in range(100_000)]"


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of those that begin during the test."""
    phases: list[str] = []

    def note(phase: str, _: object) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    yield phases
    gc.callbacks.remove(note)


def test_no_collection_begins_meanwhile_and_none_goes_through_it_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, collections: list[str]
) -> None:
    (tmp_path / "many_objects_that_stay.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "many_objects_that_stay", raising=False)
    frozen = gc.get_freeze_count()
    collections.clear()
    with imports.freeze_imports():
        importlib.import_module("many_objects_that_stay")
        assert collections == []
    assert gc.get_freeze_count() - frozen >= 100_000
    assert gc.isenabled()


def test_where_nothing_is_imported_nothing_is_kept() -> None:
    frozen = gc.get_freeze_count()
    with imports.freeze_imports():
        importlib.import_module("json")
    # What was kept before may be let go of at any time.
    assert gc.get_freeze_count() <= frozen


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with imports.freeze_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_packages_that_make_a_cuda_context_seem_missing_until_the_fork(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchao.py").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    find_spec = functools.cache(importlib.util.find_spec)
    asks = types.ModuleType("peft.import_utils")
    vars(asks)["find_spec"] = find_spec
    monkeypatch.setitem(sys.modules, asks.__name__, asks)
    with imports.import_before_forks():
        assert find_spec("torchao") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("torchao")
    assert find_spec("torchao") is not None
    importlib.import_module("torchao")
