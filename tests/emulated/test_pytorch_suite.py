"""The two tools that compare the device with PyTorch: its tables of operators, and its own tests of FSDP."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections import Counter

import pytest
from program import run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped
from support.places import ROOT

from tests.emulated import pytorch_suite
from tests.emulated.pytorch_suite import Outcome, Result

# Every so many entries of a table, and one sample of each.
_SAMPLE = ("--dtypes", "float32,bfloat16,complex64", "--one-in", "13", "--samples", "1")
_VERSIONS = {"torch": "2.13.0", "tests": "2.12.1"}
_SUITE = (sys.executable, "-m", "tests.emulated.pytorch_suite")


def test_a_sample_of_pytorchs_tables_differs_from_the_cpu_only_as_known() -> None:
    pytest.importorskip("expecttest", reason="torch's tables need expecttest")
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


# A file as PyTorch's are: it names CUDA, and imports what chooses the device and skips.
TESTS = """
import os
import unittest
import torch
from torch.testing._internal.common_distributed import at_least_x_gpu
from torch.testing._internal.common_utils import TEST_CUDA, TestCase

class TestDevice(TestCase):
    def test_a_device(self):
        self.assertTrue(TEST_CUDA)
        self.assertEqual(torch.cuda.device_count(), 3)
        self.assertEqual(torch.ones(2).cuda().device, torch.device("cuda", 0))

    def test_b_process_ends(self):
        os._exit(7)

    @unittest.skipUnless(at_least_x_gpu(4), "needs 4 devices")
    def test_c_skip(self):
        self.fail()

    def test_d_failure(self):
        raise RuntimeError("in the test")
"""


def test_tests_of_a_checkout_use_the_device_and_their_outcomes_are_compared(
    tmp_path: pathlib.Path,
) -> None:
    checkout, stub = tmp_path / "checkout", tmp_path / "stub"
    (checkout / "test" / "distributed").mkdir(parents=True)
    (checkout / "test" / "distributed" / "test_device_mesh.py").write_text(TESTS)
    stub.mkdir()
    (stub / "expecttest.py").write_text("from unittest import TestCase\n")
    path = os.pathsep.join([str(stub), str(ROOT)])
    suite = run(*_SUITE, "--pytorch", str(checkout), "--ranks", "3", env={"PYTHONPATH": path})
    assert suite.code == 1, suite.stderr
    lines = suite.stdout.splitlines()
    assert ["test_device_mesh.py", "3", "1", "2", "1", "0"] in [line.split() for line in lines]
    assert sorted(line for line in lines if line.startswith("failed: ")) == [
        f"failed: test_device_mesh.py::{test} with 3 ranks: gap: {reason}"
        for test, reason in (
            ("TestDevice.test_b_process_ends", "the process ended with exit code 7"),
            ("TestDevice.test_d_failure", "RuntimeError: in the test"),
        )
    ]
    assert "not in this checkout: fsdp/test_wrap.py" in lines


def _result(test: str, outcome: Outcome, text: str = "") -> Result:
    return Result("test_x.py", 2, test, outcome, text)


def test_differences_in_both_directions_are_reported_and_other_expectations_are_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "expected.toml"
    file.write_text("")
    monkeypatch.setattr(pytorch_suite, "EXPECTED", file)
    failed = _result("T.test_b", "failed", "RuntimeError: NCCL is not here")
    pytorch_suite.write_expected([_result("T.test_a", "passed"), failed], _VERSIONS)
    expectations: tuple[tuple[Outcome, Outcome, str], ...] = (
        ("passed", "failed", ""),
        ("failed", "failed", "failed, and expected to pass: test_x.py::T.test_a with 2 ranks"),
        ("passed", "passed", "passed, and expected to fail: test_x.py::T.test_b with 2 ranks (gap)"),
        ("skipped", "failed", "test_x.py@2: 1 failed, 1 skipped, and expected: 1 passed, 1 failed"),
    )
    for a, b, words in expectations:
        sentences = pytorch_suite.differences([_result("T.test_a", a), _result("T.test_b", b)])
        assert any(each.startswith(words) for each in sentences) if words else sentences == []
    by_hand = file.read_text().replace("RuntimeError: NCCL is not here", "by hand").replace('"gap"', '"race"')
    file.write_text(by_hand.replace("[1, 1,", "[1, 0,"))
    for outcome in ("passed", "failed"):
        assert pytorch_suite.differences([_result("T.test_a", "passed"), _result("T.test_b", outcome)]) == []
    pytorch_suite.write_expected([Result("test_y.py", 2, "T.test_c", "failed", "ValueError: no")], _VERSIONS)
    expected = pytorch_suite.read_expected()
    assert [group["reason"] for group in expected["failures"]] == ["ValueError: no", "by hand"]
    assert expected["totals"] == {"test_x.py@2": [1, 0, 0, 0], "test_y.py@2": [0, 1, 0, 0]}


def test_a_wrong_argument_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--pytorch", "no-such-directory"], "--pytorch: no-such-directory has none of the"),
        (["--pytorch", ".", "--ranks", "two"], "--ranks: two is not a list of numbers such as 2,4"),
        (["--pytorch", ".", "--file", "no_such_file"], "--file: no file has no_such_file in its path"),
    ):
        monkeypatch.setattr(sys, "argv", ["pytorch_suite.py", *arguments])
        with pytest.raises(SystemExit) as end:
            pytorch_suite.main()
        assert end.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"pytorch_suite.py: error: {words}")
