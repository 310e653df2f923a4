from __future__ import annotations

import os
import pathlib
import sys

import pytest
from program import Run, run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped
from support.places import ROOT

from tests.emulated import pytorch_expected
from tests.emulated.pytorch_run import Outcome, Result

_VERSIONS = {"torch": "2.13.0", "tests": "2.12.1"}
_SUITE = (sys.executable, "-m", "tests.emulated.pytorch_suite")

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

class TestSharedProcesses(TestCase):
    failed = False

    def test_a_failure(self):
        type(self).failed = True
        self.fail("first")

    def test_b_after_it(self):
        if self.failed:
            raise unittest.SkipTest(f"Previous test failed, skipping {self.id()}")
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command on a checkout of one file."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "test" / "distributed").mkdir(parents=True)
    (checkout / "test" / "distributed" / "test_device_mesh.py").write_text(TESTS)
    stub = tmp_path_factory.mktemp("stub")
    (stub / "expecttest.py").write_text("from unittest import TestCase\n")
    path = os.pathsep.join([str(stub), str(ROOT)])
    return run(*_SUITE, "--pytorch", str(checkout), "--ranks", "3", env={"PYTHONPATH": path})


def test_the_table_counts_what_became_of_each_test(suite: Run) -> None:
    assert ["test_device_mesh.py", "3", "2", "3", "1", "0"] in [line.split() for line in suite.stdout.splitlines()]


def test_a_test_that_names_cuda_gets_the_emulated_device(suite: Run) -> None:
    assert "test_a_device" not in suite.stdout, suite.stdout


def test_a_test_that_ends_the_process_fails_and_the_rest_of_the_file_runs(suite: Run) -> None:
    assert (
        "test_device_mesh.py::TestDevice.test_b_process_ends with 3 ranks: gap: the process ended with exit code 7"
        in suite.stdout
    )
    assert "test_device_mesh.py::TestDevice.test_d_failure with 3 ranks: gap: RuntimeError: in the test" in suite.stdout


def test_what_pytorch_skips_after_a_failure_is_run_apart(suite: Run) -> None:
    assert "TestSharedProcesses.test_a_failure with 3 ranks: gap: AssertionError: first" in suite.stdout
    assert "test_b_after_it" not in suite.stdout


def test_a_failure_that_is_not_expected_is_exit_code_1(suite: Run) -> None:
    assert suite.code == 1, suite.stderr


def test_a_file_that_the_checkout_lacks_is_named(suite: Run) -> None:
    assert "not in this checkout: fsdp/test_wrap.py" in suite.stdout


def _result(test: str, outcome: Outcome, text: str = "") -> Result:
    return Result("test_x.py", 2, test, outcome, text)


@pytest.fixture
def expectation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    file = tmp_path / "expected.toml"
    file.write_text("")
    monkeypatch.setattr(pytorch_expected, "EXPECTED", file)
    failed = _result("T.test_b", "failed", "RuntimeError: NCCL is not here")
    pytorch_expected.write([_result("T.test_a", "passed"), failed], _VERSIONS)
    return file


@pytest.mark.usefixtures("expectation")
def test_what_was_written_is_no_surprise() -> None:
    assert pytorch_expected.surprises([_result("T.test_a", "passed"), _result("T.test_b", "failed")]) == []


@pytest.mark.usefixtures("expectation")
@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("failed", "failed", "failed, and expected to pass: test_x.py::T.test_a with 2 ranks"),
        ("passed", "passed", "passed, and expected to fail: test_x.py::T.test_b with 2 ranks (cuda)"),
        ("skipped", "failed", "test_x.py@2: 1 failed, 1 skipped, and expected: 1 passed, 1 failed"),
        ("undone", "failed", "test_x.py@2: 1 failed, 1 undone, and expected: 1 passed, 1 failed"),
    ],
)
def test_a_surprise_in_either_direction_is_told(a: Outcome, b: Outcome, words: str) -> None:
    found = pytorch_expected.surprises([_result("T.test_a", a), _result("T.test_b", b)])
    assert any(each.startswith(words) for each in found), found


def test_a_test_that_races_is_no_surprise(expectation: pathlib.Path) -> None:
    expectation.write_text(
        expectation.read_text().replace('class = "cuda"', 'class = "race"').replace("[1, 1,", "[1, 0,")
    )
    for outcome in ("passed", "failed"):
        assert pytorch_expected.surprises([_result("T.test_a", "passed"), _result("T.test_b", outcome)]) == []


def test_writing_one_file_keeps_the_others_and_the_reasons(expectation: pathlib.Path) -> None:
    expectation.write_text(expectation.read_text().replace("RuntimeError: NCCL is not here", "by hand"))
    pytorch_expected.write([Result("test_y.py", 2, "T.test_c", "failed", "ValueError: no")], _VERSIONS)
    expected = pytorch_expected.read()
    assert [group["reason"] for group in expected["failures"]] == ["by hand", "ValueError: no"]
    assert expected["totals"] == {"test_x.py@2": [1, 1, 0, 0], "test_y.py@2": [0, 1, 0, 0]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pytorch", "no-such-directory"], "--pytorch: no-such-directory has none of the"),
        (["--pytorch", ".", "--ranks", "two"], "--ranks: two is not a list of numbers such as 2,4"),
        (["--pytorch", ".", "--file", "no_such_file"], "--file: no file has no_such_file in its path"),
    ],
)
def test_a_wrong_argument_is_told_in_one_sentence(arguments: list[str], words: str) -> None:
    done = run(*_SUITE, *arguments)
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith(f"pytorch_suite.py: error: {words}")


def test_a_missing_package_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test" / "distributed").mkdir(parents=True)
    (tmp_path / "test" / "distributed" / "test_device_mesh.py").touch()
    without = f"""
import runpy, sys
sys.modules["expecttest"] = None
sys.argv[1:] = ["--pytorch", {str(tmp_path)!r}]
runpy.run_module("tests.emulated.pytorch_suite", run_name="__main__")
"""
    done = run(sys.executable, "-c", without)
    assert done.code == 2
    assert "PyTorch's tests need expecttest: pip install expecttest" in done.stderr
