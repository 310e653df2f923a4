"""Python looks for garbage in what stays neither while it is imported nor afterwards."""

from __future__ import annotations

import gc
import importlib
import pathlib
import sys
from collections.abc import Iterator

import pytest

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
