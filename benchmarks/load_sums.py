"""Measures a load from the page cache that compares the checksums of the save, relative to the same load without them.

torchrun --nproc-per-node 2 benchmarks/load_sums.py [--device cuda --hidden 2560]

The two loads take turns. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from host_time import sharded
from ranks import BACKENDS, join_group, make_shared_directory

from fsdp_doctor import load_full_tensors, save_full_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BACKENDS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--directory", help="where the files are written; one in main memory, such as /dev/shm")
    options = parser.parse_args()
    join_group(options.device)
    model = sharded(options.device, options.hidden)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with make_shared_directory(options.directory) as directory:
        saved = directory / "saved"
        save_full_tensors(model, saved, names="model")
        for _ in range(options.repeat):
            for checks in seconds:
                dist.barrier()
                begin = time.perf_counter()
                report = load_full_tensors(model, saved, check_sums=checks)
                took = torch.tensor(time.perf_counter() - begin, device=options.device)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                seconds[checks].append(float(took))
                assert report.checked == (report.loaded if checks else 0)
    checked, plain = (statistics.median(seconds[checks][1:]) for checks in (True, False))
    if dist.get_rank() == 0:
        print(f"with sums {checked * 1e3:.0f} ms, without {plain * 1e3:.0f} ms: {checked / plain:.2f} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
