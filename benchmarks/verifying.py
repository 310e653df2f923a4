"""Compares the processor time of ``checkpoint verify`` with that of ``cat`` on the same files.

python benchmarks/verifying.py [--directory /dev/shm --gigabytes 4 --repeat 5]

The files are safetensors with random weights in bfloat16, float32 or float16, and the same weights as a file of
torch.save with checksums. Both programs take turns. The least time of each is shown, with and without the start of
Python, which is measured on a checkpoint of one number. The first run, which is not shown, writes the bytecode of all
modules, as an installation does.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import save_file

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_ROWS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the files are written; by default, the temporary directory")
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{'files':24} {'GB':>5} {'cat':>7} {'verify':>7} {'ratio':>6} {'without the start':>18}")
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(pathlib.Path(base, "bytecode"))
        for kind in (*(f"safetensors {dtype}".replace("torch.", "") for dtype in _DTYPES), "torch.save bfloat16"):
            _measure(kind, pathlib.Path(base), options.gigabytes, options.repeat)


def _measure(kind: str, base: pathlib.Path, gigabytes: float, repeat: int) -> None:
    directory, small = base / "large", base / "small"
    for each in (directory, small):
        each.mkdir(exist_ok=True)
    format_name, dtype_name = kind.split()
    dtype = getattr(torch, dtype_name)
    columns = int(gigabytes * 1e9 / 8 / _ROWS / dtype.itemsize)
    torch.manual_seed(0)
    weights = {f"layers.{number}.weight": (torch.randn(_ROWS, columns) * 0.02).to(dtype) for number in range(8)}
    for place, tensors in ((directory, weights), (small, {"weight": torch.ones(3, dtype=dtype)})):
        if format_name == "safetensors":
            save_file(tensors, place / "model.safetensors")
        else:
            torch.save(tensors, place / "pytorch_model.bin")
    (file,) = directory.iterdir()
    size = file.stat().st_size / 1e9
    command = [sys.executable, "-m", "fsdp_doctor", "checkpoint", "verify"]
    best = {"cat": float("inf"), "verify": float("inf"), "start": float("inf")}
    _time([*command, str(small)])
    for _ in range(repeat):
        for name, arguments in (
            ("cat", ["cat", str(file)]),
            ("verify", [*command, str(directory)]),
            ("start", [*command, str(small)]),
        ):
            best[name] = min(best[name], _time(arguments))
    print(
        f"{kind:24} {size:5.1f} {best['cat']:7.2f} {best['verify']:7.2f} {best['verify'] / best['cat']:6.1f} "
        f"{(best['verify'] - best['start']) / best['cat']:18.1f}"
    )
    for place in (directory, small):
        for file in place.iterdir():
            file.unlink()


def _time(command: list[str]) -> float:
    """Returns the processor time of a command and its children, in seconds."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    main()
