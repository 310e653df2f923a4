"""A sample of PyTorch's tables on the device: what differs from the CPU is what is known to."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest
from program import run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped
from support.places import ROOT

pytest.importorskip("expecttest", reason="torch's tables need expecttest")

# Every so many entries of a table, and one sample of each.
_SAMPLE = ("--dtypes", "float32,bfloat16,complex64", "--one-in", "13", "--samples", "1")


def test_what_differs_from_the_cpu_is_known_to() -> None:
    done = run(sys.executable, "-m", "tests.emulated.torch_tables", *_SAMPLE, cwd=ROOT)
    assert done.code == 0, done.stdout + done.stderr
    equal: Counter[str] = Counter()
    for table, count in re.findall(r"^(.{15}) .{10} +(\d+)", done.stdout, re.MULTILINE):
        equal[table.strip()] += int(count)
    assert equal["forward"] > 20
    assert equal["sparse"] > 10
    assert equal["error"] > 40
    assert equal["module"] > 5
    assert equal["optimizer"] > 10
