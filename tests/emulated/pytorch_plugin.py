"""The pytest plugin of a file of PyTorch's tests.

Each outcome is written as a line of JSON at once, so that a run that is killed leaves what it had.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
from typing import Any

import pytest
import torch

import tests.emulated.pytorch_device  # noqa: F401, so that an error in it is one of this process, too

_FILE = pathlib.Path(os.environ["PYTORCH_SUITE_OUTCOMES"])
_DONE = frozenset(json.loads(os.environ["PYTORCH_SUITE_DONE"]))


# What the ranks import, once for all of them.
_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.testing._internal.common_fsdp"]


def pytest_configure() -> None:
    # Where the ranks are threads, all of them are on the device that this process has chosen.
    torch.emulated.init()
    multiprocessing.set_forkserver_preload(_PRELOADED)


def _write(nodeid: str, state: str, text: str = "") -> None:
    with _FILE.open("a") as file:
        file.write(json.dumps([_test(nodeid), state, text]) + "\n")


def _test(nodeid: str) -> str:
    return ".".join(nodeid.split("::")[1:])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write("::(the file)", "failed", report.longreprtext)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _test(item.nodeid) not in _DONE]
    for item in items:
        _write(item.nodeid, "collected")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _write(report.nodeid, "skipped", report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
    elif report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.when == "call":
        _write(report.nodeid, "passed")
