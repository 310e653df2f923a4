"""A framework that is not there or cannot be imported is told so, and the process that imports it goes on."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from fsdp_doctor.frameworks import framework_worker
from fsdp_doctor.frameworks.adapter import Adapter, FrameworkSession


class _Broken(Adapter):
    def __init__(self, importing: Callable[[], None]) -> None:
        self._importing = importing

    def preload(self) -> None:
        self._importing()

    def build(self, *arguments: object) -> FrameworkSession:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _forgets_what_was_imported() -> Iterator[None]:
    yield
    framework_worker._unavailable.clear()


def _reason_of(monkeypatch: pytest.MonkeyPatch, scratch: pathlib.Path, adapter: Adapter, seconds: float = 30.0) -> str:
    monkeypatch.setattr(framework_worker, "find_adapter", lambda name: adapter)
    framework_worker.preload(["accelerate"], scratch, seconds)
    return framework_worker.explain_unavailable("accelerate")


def _raises() -> None:
    raise ImportError("libexample.so.3 is not there\nand more")


def _exits() -> None:
    sys.exit("no licence")


def _prints_without_end() -> None:
    while True:
        os.write(1, b"still importing")
        os.write(2, b"still importing")


@pytest.mark.parametrize(
    ("importing", "reason"),
    [
        (_raises, "cannot be imported: ImportError: libexample.so.3 is not there"),
        (_exits, "cannot be imported: SystemExit: no licence"),
        (_prints_without_end, "cannot be imported: TimeoutError: it took longer than 0.2 s"),
    ],
)
def test_an_import_that_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    importing: Callable[[], None],
    reason: str,
) -> None:
    assert _reason_of(monkeypatch, tmp_path, _Broken(importing), seconds=0.2).endswith(reason)
    assert capfd.readouterr() == ("", "")


def test_one_that_is_not_installed_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(framework_worker, "read_installed_versions", lambda packages: {})
    assert _reason_of(monkeypatch, tmp_path, _Broken(_exits)) == "accelerate is not installed"


def test_one_that_can_be_imported_has_no_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert _reason_of(monkeypatch, tmp_path, _Broken(lambda: None)) == ""
