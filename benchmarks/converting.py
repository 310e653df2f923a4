"""Measures the cost of converting a checkpoint with this program, torch, accelerate's own code, and verl's scheme.

python benchmarks/converting.py [--directory /dev/shm --gigabytes 0.6 --repeat 5]

Two ranks save a model in float32 and bfloat16, whose rows divide unevenly, as DCP and as files of ranks. Each tool
converts it in a separate process, and the tools take turns. The best run of each is shown: wall clock and processor
time of the call, without imports, and the growth of the process's memory. ``equal`` counts the tensors that are equal
bit by bit.

``plain copy`` is the lower bound: it reads the files in pieces of 256 KiB, writes them one after the other, and checks
nothing. ``fsync`` is included if a tool calls it, which only fsdp-doctor does.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

# Maps each tool to the checkpoint that it converts.
TOOLS = {
    "plain copy": "dcp",
    "torch dcp_to_torch_save": "dcp",
    "accelerate merge_fsdp_weights": "dcp",
    "verl's scheme (all ranks, cat, save)": "ranks",
    "fsdp-doctor DCP to torch": "dcp",
    "fsdp-doctor DCP to hf": "dcp",
    "fsdp-doctor DCP to DCP of 3": "dcp",
    "fsdp-doctor ranks to hf": "ranks",
    "fsdp-doctor ranks to fsdp1 of 3": "ranks",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the files are written; by default, the temporary directory")
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tool", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.save:
        save(pathlib.Path(options.save), options.gigabytes)
    elif options.tool:
        name, source, target = options.tool
        print(json.dumps(measure(name, pathlib.Path(source), pathlib.Path(target))))
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            compare(pathlib.Path(directory), options)


def compare(directory: pathlib.Path, options: argparse.Namespace) -> None:
    ranks = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--log-dir",
        str(directory / "log"),
    ]
    subprocess.run([*ranks, __file__, "--save", str(directory), "--gigabytes", str(options.gigabytes)], check=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in TOOLS}
    equal: dict[str, str] = {}
    for _ in range(options.repeat):
        for name, source in TOOLS.items():
            target = directory / "target"
            command = [sys.executable, __file__, "--tool", name, str(directory / source), str(target)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            equal[name] = equal.get(name) or count_equal(target, directory / "whole.pt")
            shutil.rmtree(target)
    size = (directory / "whole.pt").stat().st_size / 1e9
    print(f"{size:.2f} GB; load of the machine {os.getloadavg()[0]:.1f}")
    print(f"{'':40}{'GB/s':>7}{'CPU s':>8}{'GB per CPU s':>14}{'MB more':>9}  equal")
    for name, runs in found.items():
        wall, cpu, peak = (min(run[key] for run in runs) for key in ("wall", "cpu", "peak"))
        print(f"{name:40}{size / wall:7.2f}{cpu:8.2f}{size / cpu:14.2f}{peak / 1e6:9.0f}  {equal[name]}")


def save(directory: pathlib.Path, gigabytes: float) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    count = 21
    rows = int(gigabytes * 1e9 / count / 6 / 2049)
    whole = {}
    for layer in range(count):
        whole[f"layers.{layer}.weight"] = torch.randn(2049, rows)
        whole[f"layers.{layer}.half"] = torch.randn(2049, rows).bfloat16()
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save({"model": state}, checkpoint_id=directory / "dcp")
    (directory / "ranks").mkdir(exist_ok=True)
    torch.save(state, directory / "ranks" / f"model_world_size_2_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(whole, directory / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, source: pathlib.Path, target: pathlib.Path) -> dict[str, float]:
    convert = prepare(name, source, target)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, wall, cpu = read_peak(), time.perf_counter(), time.process_time()
    convert()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "peak": read_peak() - before,
    }


def read_peak() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def prepare(name: str, source: pathlib.Path, target: pathlib.Path) -> Callable[[], object]:
    """Returns the call to measure, after its imports."""
    if name == "plain copy":
        return lambda: copy(source, target)
    if name.startswith("fsdp-doctor"):
        from fsdp_doctor.checkpoints.conversion import convert
        from fsdp_doctor.checkpoints.targets import ConversionTarget

        words = name.lower().split()
        to = ConversionTarget(words[3])
        return lambda: convert(source, target, to, world_size=3 if words[-1] == "3" else None)
    import torch
    import torch.distributed.tensor
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if name.startswith("torch"):
        target.mkdir()
        return lambda: dcp_to_torch_save(source, target / "model.pt")
    if name.startswith("accelerate"):
        from accelerate.utils import merge_fsdp_weights

        return lambda: merge_fsdp_weights(str(source), str(target))
    from safetensors.torch import save_file

    def merge() -> None:
        """Merges as verl's FSDPModelMerger does: loads every rank's file whole, and joins the shards of each tensor."""
        files = sorted(source.glob("model_world_size_*_rank_*.pt"))
        ranks = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
        merged = {}
        for key in list(ranks[0]):
            merged[key] = torch.cat([rank.pop(key).to_local().bfloat16() for rank in ranks])
        target.mkdir()
        save_file(merged, target / "model.safetensors", {"format": "pt"})

    return merge


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
    buffer = memoryview(bytearray(1 << 18))
    target.mkdir()
    for file in source.iterdir():
        with open(file, "rb", buffering=0) as read, open(target / file.name, "wb", buffering=0) as written:
            while count := read.readinto(buffer):
                written.write(buffer[:count])


def count_equal(target: pathlib.Path, whole: pathlib.Path) -> str:

    from fsdp_doctor.weights.fingerprints.checkpoint_files import compare_checkpoints

    found = compare_checkpoints(whole, target)
    return f"{len(found.equal)}/{found.compared}"


if __name__ == "__main__":
    main()
