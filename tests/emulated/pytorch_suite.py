"""PyTorch's own tests of FSDP on the emulated device, from a checkout of PyTorch.

    python -m tests.emulated.pytorch_suite --pytorch DIR [--ranks 2,4] [--file NAME ...] [--write]

The checkout should be of the version of torch that is installed; the tests are read from it, nothing is copied. What
torch's tests ask the machine (which device, how many of them, is there NCCL) is answered for the emulated device
before a file is loaded; torch's FSDP itself is as it is installed. Each file runs in a process of its own, with a time
limit. Prints a table by file, then each failure with its class, and compares with ``pytorch_suite.toml``; exit code 1
for a test that is not as expected there. ``--write`` writes what came out as what is expected.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPECTED = pathlib.Path(__file__).with_name("pytorch_suite.toml")
SECONDS_OF_A_FILE = 1800

_FSDP2 = "test/distributed/_composable/fsdp/test_fully_shard_{}.py"
_FSDP1 = "test/distributed/fsdp/test_fsdp_{}.py"
_DCP = "test/distributed/checkpoint/test_{}.py"
FILES = (
    *map(_FSDP2.format, ("training", "comm", "state_dict", "memory", "autograd", "extensions", "frozen", "state")),
    *map(_FSDP2.format, ("clip_grad_norm_", "init", "mixed_precision", "grad_scaler", "ignore_params", "logging")),
    "test/distributed/_composable/test_replicate_training.py",
    "test/distributed/_composable/test_composability/test_2d_composability.py",
    *map(_FSDP1.format, ("core", "optim_state", "mixed_precision", "state_dict", "unshard_params", "misc", "grad_acc")),
    *map(_FSDP1.format, ("use_orig_params", "summon_full_params", "sharded_grad_scaler")),
    "test/distributed/fsdp/test_wrap.py",
    *map(_DCP.format, ("state_dict", "state_dict_stager", "state_dict_utils")),
    "test/distributed/checkpoint/e2e/test_e2e_save_and_load.py",
    "test/distributed/test_device_mesh.py",
)

Outcome = Literal["passed", "failed", "skipped"]
# Why a test fails: it names CUDA outright, needs what is documented as absent, was written for another torch, came to
# no end, ended the process, or none of these.
FailureClass = Literal["cuda", "compile", "version", "hang", "crash", "other"]

_CLASSES: tuple[tuple[FailureClass, str], ...] = (
    ("cuda", r"Torch not compiled with CUDA|Found no NVIDIA driver|device type cuda|torch\._C.*_cuda_|'cuda(:\d)?'"),
    ("cuda", r"built without NCCL|NCCL built in|ProcessGroupNCCL"),
    ("compile", r"torch\._dynamo|torch\._inductor|InductorError|BackendCompilerFailed|[Tt]riton"),
    ("version", r"ImportError|ModuleNotFoundError|unexpected keyword argument|has no attribute '\w+'"),
    ("hang", r"timed? ?out|Timeout|came to no end"),
    ("crash", r"exit code -\d+|Segmentation fault|SIGABRT|SIGSEGV"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    file: str
    ranks: int
    test: str
    outcome: Outcome
    text: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}@{self.ranks}"

    @property
    def failure_class(self) -> FailureClass:
        return next((name for name, pattern in _CLASSES if re.search(pattern, self.text)), "other")


def run_file(checkout: pathlib.Path, file: str, ranks: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as directory:
        xml = pathlib.Path(directory) / "results.xml"
        # The ranks of a test are processes of their own, which Python starts: each imports this first.
        (pathlib.Path(directory) / "sitecustomize.py").write_text("import tests.emulated.pytorch_answers\n")
        path = [directory, str(ROOT), str(checkout / "test"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "EMULATED_SUITE_RANKS": str(ranks),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        command += ["-c", os.devnull, "--rootdir", str(checkout), f"--junitxml={xml}", str(checkout / file)]
        process = subprocess.Popen(
            command, env=env, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=SECONDS_OF_A_FILE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            printed += b"\ncame to no end"
        if xml.exists():
            return [_result(case, file, ranks) for case in ElementTree.parse(xml).iter("testcase")]
        tail = printed.decode(errors="replace")[-2000:]
        return [Result(file, ranks, "(the file)", "failed", f"exit code {process.returncode}\n{tail}")]


def _result(case: ElementTree.Element, file: str, ranks: int) -> Result:
    test = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return Result(file, ranks, test, "failed", f"{found.get('message')}\n{found.text}")
    if (skipped := case.find("skipped")) is not None:
        return Result(file, ranks, test, "skipped", skipped.get("message") or "")
    return Result(file, ranks, test, "passed")


# What is expected: which tests do not pass, with their class; every other test of these files passes or is skipped.


def expected() -> dict[str, str]:
    return dict(tomllib.loads(EXPECTED.read_text()).get("failures", {}))


def differences(results: Sequence[Result], failures: dict[str, str]) -> Iterator[str]:
    for result in results:
        known = failures.get(result.name)
        if result.outcome == "failed" and known is None:
            yield f"fails, and is expected to pass: {result.name} ({result.failure_class})"
        elif result.outcome == "passed" and known is not None:
            yield f"passes, and is expected to fail: {result.name} ({known})"


def written(results: Sequence[Result]) -> str:
    import torch

    lines = [f'torch = "{torch.__version__}"', "", "[failures]"]
    lines += [f'"{each.name}" = "{each.failure_class}"' for each in results if each.outcome == "failed"]
    return "\n".join(lines) + "\n"


def table(results: Sequence[Result]) -> str:
    counts = Counter((result.file, result.ranks, result.outcome) for result in results)
    lines = [f"{'file':76} {'ranks':>5} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    for file, ranks in dict.fromkeys((result.file, result.ranks) for result in results):
        passed, failed, skipped = (counts[file, ranks, outcome] for outcome in ("passed", "failed", "skipped"))
        lines.append(f"{file:76} {ranks:5} {passed:7} {failed:7} {skipped:7}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=pathlib.Path, required=True, metavar="DIR", help="a checkout of PyTorch")
    parser.add_argument("--ranks", default="2,4", help="how many devices the tests see, one run for each number")
    parser.add_argument("--file", action="append", metavar="NAME", help="only files whose path contains NAME")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name} instead of comparing with it")
    options = parser.parse_args()
    wanted = [file for file in FILES if not options.file or any(part in file for part in options.file)]
    missing = [file for file in wanted if not (options.pytorch / file).is_file()]
    if len(missing) == len(wanted):
        parser.error(f"{options.pytorch} has none of the {len(wanted)} files, the first is {missing[0]}")
    results: list[Result] = []
    for ranks in map(int, options.ranks.split(",")):
        for file in wanted:
            if file not in missing:
                results += run_file(options.pytorch.resolve(), file, ranks)
    print(table(results))
    for file in missing:
        print(f"not in this checkout: {file}")
    for result in results:
        if result.outcome == "failed":
            print(f"{result.failure_class:8} {result.name}: {result.text.splitlines()[0][:160] if result.text else ''}")
    if options.write:
        EXPECTED.write_text(written(results))
        return 0
    found = list(differences(results, expected()))
    print("\n".join(found) if found else "everything is as expected")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
