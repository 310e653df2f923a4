"""PyTorch's own tests of FSDP on the emulated device, from a checkout of PyTorch.

    python -m tests.emulated.pytorch_suite --pytorch DIR [--ranks 2,4] [--file NAME ...] [--write]

The tests are read from the checkout, nothing is copied; where they and what they share name CUDA, they get the
emulated device (``pytorch_device.py``). Torch's FSDP is as it is installed. Each file runs in a process of its own; a
test that comes to no end or ends the process is a failure, and the rest of its file goes on in another process.

Prints a table by file and each failure with its class, and compares with ``pytorch_suite.toml``: exit code 1 for a test
that is not as expected there. ``--write`` makes what came out the expectation, of the files that were run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Sequence

from tests.emulated import pytorch_expected
from tests.emulated.pytorch_run import Result, run_file

TESTS = pathlib.Path("test", "distributed")
FILES = (
    *(
        f"_composable/fsdp/test_fully_shard_{name}.py"
        for name in (
            *("training", "comm", "state_dict", "memory", "autograd", "extensions", "frozen", "state"),
            *("clip_grad_norm_", "init", "mixed_precision", "grad_scaler", "ignore_params", "logging", "overlap"),
        )
    ),
    "_composable/test_replicate_training.py",
    "_composable/test_composability/test_2d_composability.py",
    *(
        f"fsdp/test_fsdp_{name}.py"
        for name in (
            *("core", "optim_state", "mixed_precision", "state_dict", "unshard_params", "misc", "grad_acc"),
            *("use_orig_params", "summon_full_params", "sharded_grad_scaler"),
        )
    ),
    "fsdp/test_wrap.py",
    *(f"checkpoint/test_{name}.py" for name in ("state_dict", "state_dict_stager", "state_dict_utils", "utils")),
    "checkpoint/e2e/test_e2e_save_and_load.py",
    "test_device_mesh.py",
)
NEEDED = ("pytest", "expecttest", "numpy")


def table(results: Sequence[Result]) -> str:
    counts = Counter((result.file, result.ranks, result.outcome) for result in results)
    lines = [f"{'file':60} {'ranks':>5} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    runs = list(dict.fromkeys((result.file, result.ranks) for result in results))
    for file, ranks in runs:
        each = [counts[file, ranks, outcome] for outcome in ("passed", "failed", "skipped")]
        lines.append(f"{file:60} {ranks:5} " + " ".join(f"{count:7}" for count in each))
    total = Counter(result.outcome for result in results)
    lines.append(f"{'':66} " + " ".join(f"{total[outcome]:7}" for outcome in ("passed", "failed", "skipped")))
    return "\n".join(lines)


def versions(checkout: pathlib.Path) -> dict[str, str]:
    """Of torch, which is installed, and of the tests."""
    file = checkout / "version.txt"
    tests = file.read_text().strip() if file.is_file() else "unknown"
    return {"torch": importlib.metadata.version("torch").split("+")[0], "tests": tests}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=pathlib.Path, required=True, metavar="DIR", help="a checkout of PyTorch")
    parser.add_argument("--ranks", default="2,4", help="how many devices the tests see, one run for each number")
    parser.add_argument("--file", action="append", metavar="NAME", help="only files whose path contains NAME")
    parser.add_argument("--log", type=pathlib.Path, metavar="FILE", help="append the tracebacks of failures to FILE")
    parser.add_argument(
        "--no-late-completion", action="store_true", help="copies happen at once; compares with nothing"
    )
    parser.add_argument("--write", action="store_true", help="make what comes out the expectation")
    options = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.ranks):
        parser.error(f"--ranks: {options.ranks} is not a list of numbers such as 2,4")
    wanted = [file for file in FILES if not options.file or any(part in file for part in options.file)]
    if not wanted:
        parser.error(f"--file: no file has {' or '.join(options.file)} in its path")
    tests = (options.pytorch / TESTS).resolve()
    present = [file for file in wanted if (tests / file).is_file()]
    if not present:
        parser.error(f"--pytorch: {options.pytorch} has none of the {len(wanted)} files, such as {TESTS / wanted[0]}")
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"PyTorch's tests need {', '.join(absent)}: pip install {' '.join(absent)}")

    results: list[Result] = []
    for ranks in map(int, options.ranks.split(",")):
        for file in present:
            results += run_file(tests, file, ranks, late=not options.no_late_completion)
            print(table([each for each in results if (each.file, each.ranks) == (file, ranks)]), flush=True)
            if options.log:
                with options.log.open("a") as log:
                    for each in results:
                        if each.outcome == "failed" and (each.file, each.ranks) == (file, ranks):
                            log.write(f"==== {each.name}\n{each.text}\n")

    print(table(results))
    for file in wanted:
        if file not in present:
            print(f"not in this checkout: {file}")
    for result in results:
        if result.outcome in ("failed", "undone"):
            print(f"{result.outcome} {result.name}: {result.why[:200]}")
    if options.no_late_completion:
        return 0
    if options.write:
        pytorch_expected.write(results, versions(options.pytorch))
        return 0
    print(pytorch_expected.comparison(versions(options.pytorch)))
    surprises = pytorch_expected.surprises(results)
    print("\n".join(surprises) if surprises else "everything is as expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
