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
from tests.emulated.pytorch_run import OUTCOMES, Result, run_file

TESTS = pathlib.Path("test", "distributed")
FILES = (
    *(
        f"_composable/fsdp/test_fully_shard_{name}.py"
        for name in (
            *("training", "comm", "state_dict", "memory", "autograd", "extensions", "frozen", "state"),
            *("clip_grad_norm_", "init", "mixed_precision", "grad_scaler", "ignore_params", "logging"),
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


def row(head: str, results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return head + " " + " ".join(f"{counts[outcome]:7}" for outcome in OUTCOMES)


def versions(checkout: pathlib.Path) -> dict[str, str]:
    """Of torch, which is installed, and of the tests."""
    file = checkout / "version.txt"
    tests = file.read_text().strip() if file.is_file() else "unknown"
    return {"torch": importlib.metadata.version("torch").split("+")[0], "tests": tests}


def options() -> argparse.Namespace:
    """What the command was told; ``files`` are those of the checkout, ``missing`` those that it lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=pathlib.Path, required=True, metavar="DIR", help="a checkout of PyTorch")
    parser.add_argument("--ranks", default="2,4", help="how many devices the tests see, one run for each number")
    parser.add_argument("--file", action="append", metavar="NAME", help="only files whose path contains NAME")
    parser.add_argument("--log", type=pathlib.Path, metavar="FILE", help="append the tracebacks of failures to FILE")
    parser.add_argument(
        "--no-late-completion", action="store_true", help="copies happen at once; compares with nothing"
    )
    parser.add_argument("--write", action="store_true", help="make what comes out the expectation")
    told = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", told.ranks):
        parser.error(f"--ranks: {told.ranks} is not a list of numbers such as 2,4")
    wanted = [file for file in FILES if not told.file or any(part in file for part in told.file)]
    if not wanted:
        parser.error(f"--file: no file has {' or '.join(told.file)} in its path")
    tests = told.pytorch / TESTS
    told.files = [file for file in wanted if (tests / file).is_file()]
    told.missing = [file for file in wanted if file not in told.files]
    if not told.files:
        parser.error(f"--pytorch: {told.pytorch} has none of the {len(wanted)} files, such as {TESTS / wanted[0]}")
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"PyTorch's tests need {', '.join(absent)}: pip install {' '.join(absent)}")
    return told


def run(told: argparse.Namespace) -> list[Result]:
    """Every file with every number of ranks, one after the other; prints each as it is done."""
    results: list[Result] = []
    for ranks in map(int, told.ranks.split(",")):
        for file in told.files:
            done = run_file((told.pytorch / TESTS).resolve(), file, ranks, late=not told.no_late_completion)
            print(row(f"{file:60} {ranks:5}", done), flush=True)
            if told.log:
                with told.log.open("a") as log:
                    log.writelines(f"==== {each.name}\n{each.text}\n" for each in done if each.outcome == "failed")
            results += done
    return results


def main() -> int:
    told = options()
    print(f"{'file':60} {'ranks':>5} " + " ".join(f"{outcome:>7}" for outcome in OUTCOMES))
    results = run(told)
    print(row(" " * 66, results))
    for file in told.missing:
        print(f"not in this checkout: {file}")
    for result in results:
        if result.outcome in ("failed", "undone"):
            where = f"{result.name} with {result.ranks} ranks"
            print(f"{result.outcome}: {where}: {pytorch_expected.class_of(result)}: {result.why[:200]}")
    for reason, count in Counter(result.text for result in results if result.outcome == "skipped").most_common():
        print(f"skipped: {count}: {reason.removeprefix('Skipped: ')}")
    if told.no_late_completion:
        return 0
    if told.write:
        pytorch_expected.write(results, versions(told.pytorch))
        return 0
    print(pytorch_expected.comparison(versions(told.pytorch)))
    for unlisted in pytorch_expected.unlisted(results):
        print(f"no totals are listed for {unlisted}")
    surprises = pytorch_expected.surprises(results)
    print("\n".join(surprises) if surprises else "everything is as expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
