"""Which tests start processes, and what all tests share of those that cost much.

A test whose file imports ``program``, or that runs on ranks, is marked ``processes``. Any other one belongs to
``make check`` and fails if it starts a process.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

if TYPE_CHECKING:
    from support.ranks import Groups

_STARTS_A_PROCESS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})
_started: list[str] | None = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _starts_processes(item):
            item.add_marker("processes")


def _starts_processes(item: pytest.Function) -> bool:
    of_program = {getattr(value, "__module__", "") for value in vars(item.module).values()}
    return "program" in of_program or "groups" in item.fixturenames


def _note_a_started_process(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in _STARTS_A_PROCESS:
        _started.append(f"{event} {arguments[:2]}")
        raise RuntimeError(f"a test that is not marked `processes` starts one: {_started[-1]}")


sys.addaudithook(_note_a_started_process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _started
    _started = None if item.get_closest_marker("processes") else []
    try:
        result = yield
        if _started:
            pytest.fail(f"it started a process: {_started}", pytrace=False)
        return result
    finally:
        _started = None


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    from support.ranks import Groups

    groups = Groups()
    yield groups
    groups.end()
