"""Starts a rollout engine on a device beside a trainer's worker, with and without the FSDP model in the worker.

python engine_beside_trainer.py --model qwen2.5-3b --device cuda --device-memory 24GiB
python engine_beside_trainer.py --model small --device emulated --device-memory 24MiB

The worker and the engine are separate processes. Each reports the memory that it uses, and keeps it until both have
reported. The engine is a stand-in: it asks for its share of the device's memory as vLLM does, and takes it for weights
and a cache. The worker stands for one of `fsdp_size=1`, which has the whole model. Exit code 1: the engine was refused
beside the loaded model.
"""

import argparse
import contextlib
import dataclasses
import itertools
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONFIGS = {
    "small": transformers.Qwen3Config(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, vocab_size=4096, tie_word_embeddings=True,
    ),
    "qwen2.5-3b": transformers.Qwen2Config(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
}  # fmt: skip
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
# Pieces of the engine's cache, so that no tensor is larger than what is free.
PIECE = 256 << 20


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process on the device; `elsewhere` is what other processes and the context hold."""

    held: dict[str, int]
    allocated: int
    reserved: int
    elsewhere: int


@dataclasses.dataclass(frozen=True)
class Start:
    """How the engine's start ended: `refusal` is empty where it started."""

    free: int
    total: int
    requested: int
    refusal: str = ""


def read_size(text):
    number, unit = float(text[:-3]), text[-3:]
    return int(number * UNITS[unit])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="qwen2.5-3b")
    parser.add_argument("--device", default="cuda", help="cuda, xpu, or emulated")
    parser.add_argument("--device-memory", type=read_size, required=True, help="limit, such as 24GiB")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8, help="the share that the engine wants")
    return parser.parse_args()


def open_device(options, scratch):
    if options.device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401  it registers the device

        torch.emulated.share_devices(scratch / "devices")
        torch.emulated.set_memory_limit(options.device_memory)
    device = torch.device(options.device, 0)
    torch.get_device_module(device).set_device(device)
    return device


def build_on_meta(options):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[options.model], dtype=torch.bfloat16)


def read_memory(device, held):
    module = torch.get_device_module(device)
    module.synchronize(device)
    free, total = module.mem_get_info(device)
    allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    return Memory(held, allocated, reserved, total - free - reserved)


def run_trainer(pipe, options, scratch, loads):
    device = open_device(options, scratch)
    backend = dist.get_default_backend_for_device(device.type)
    store = dist.FileStore(str(scratch / "store"), 1)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator
    held = {}
    if loads:
        model = build_on_meta(options)
        mesh = init_device_mesh(device.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh).to_empty(device=device)
        model.tie_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                shard = parameter.to_local()
                shard.copy_(torch.randn(shard.shape, dtype=shard.dtype, device=device) * 0.02)
        held["FSDP parameters"] = sum(parameter.to_local().nbytes for parameter in model.parameters())
    pipe.send(read_memory(device, held))
    pipe.recv()
    dist.destroy_process_group()


def request_memory(options, device, weights):
    """Asks as vLLM does (request_memory of v1/worker/utils.py): the share is of all memory, and must be free."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    free, total = max(0, options.device_memory - (total - free)), options.device_memory
    requested = int(total * options.gpu_memory_utilization)
    unit, size = choose_unit(total)
    refusal = ""
    if free < requested:
        refusal = (
            f"Free memory on device {device} ({free / size:.2f}/{total / size:.2f} {unit}) on startup is less than "
            f"desired GPU memory utilization ({options.gpu_memory_utilization:g}, {requested / size:.2f} {unit})"
        )
    elif requested < weights:
        refusal = f"No available memory for the cache blocks: the weights alone take {weights / size:.2f} {unit}"
    return Start(free, total, requested, refusal)


def run_engine(pipe, options, scratch):
    device = open_device(options, scratch)
    sizes = [parameter.numel() for parameter in build_on_meta(options).parameters()]
    nbytes = sum(sizes) * torch.bfloat16.itemsize
    start = request_memory(options, device, nbytes)
    weights, cache = [], []
    if not start.refusal:
        rest = start.requested - nbytes
        pieces = [PIECE] * (rest // PIECE) + [rest % PIECE]
        weights = [torch.empty(numel, dtype=torch.bfloat16, device=device) for numel in sizes]
        cache = [torch.empty(piece, dtype=torch.uint8, device=device) for piece in pieces]
    held = {"weights": sum(t.nbytes for t in weights), "key-value cache": sum(t.nbytes for t in cache)}
    pipe.send((start, read_memory(device, held)))
    pipe.recv()


@contextlib.contextmanager
def running(function, *arguments):
    """Starts a process, and yields its first report; the process ends with the context."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()  # EOFError where the process ends first: its own traceback says why
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(20)
        process.kill()


def choose_unit(nbytes):
    return next((unit, size) for unit, size in reversed(UNITS.items()) if nbytes >= size)


def print_start(state, start, trainer, engine):
    unit, size = choose_unit(start.total)

    def format_rows(memory):
        explained = sum(memory.held.values())
        rows = {
            **memory.held,
            "unexplained": memory.allocated - explained,
            "cached by the allocator": memory.reserved - memory.allocated,
            "elsewhere on the device": memory.elsewhere,
        }
        rows = {name: nbytes for name, nbytes in rows.items() if nbytes >= size / 200}
        return [
            f"{name:24}{nbytes / size:8.2f}" for name, nbytes in (rows | {"reserved in all": memory.reserved}).items()
        ]

    free = f"{start.total / size:.2f} {unit}, of which {start.free / size:.2f} were free"
    print(f"FSDP model {state}: {free} when the engine asked for {start.requested / size:.2f}\n")
    rows = [
        ("trainer worker", "engine"),
        *itertools.zip_longest(format_rows(trainer), format_rows(engine), fillvalue=""),
    ]
    for left, right in rows:
        print(f"  {left:34}{right}".rstrip())
    print(f"\n  {start.refusal or 'the engine started'}\n")


def print_remedies(start, trainer):
    """Prints what would free how much, and whether the engine would start then. `fsdp_size=-1` is over 8 ranks."""
    unit, size = choose_unit(start.total)
    parameters = trainer.held["FSDP parameters"]
    share = int(100 * start.free / start.total) / 100
    freed = {
        "do not build the FSDP model in a worker that only generates": trainer.reserved,
        "param_offload=true, and the cache emptied after the load": trainer.reserved,
        "fsdp_size=-1, over 8 ranks": parameters - parameters // 8,
        "empty the cache after the load (verl PR 5384)": trainer.reserved - trainer.allocated,
    }
    print("What would free how much on this device:")
    for setting, nbytes in freed.items():
        if nbytes:
            suffices = "the engine starts" if nbytes >= start.requested - start.free else "not enough"
            print(f"  {nbytes / size:8.2f} {unit}  {suffices:17}  {setting}")
    smaller = f"gpu_memory_utilization={share:g}: the engine has so much less for its cache"
    print(f"  {0:8.2f} {unit}  {'the engine starts':17}  {smaller}")


def main():
    options = parse_arguments()
    print(f"{options.model}: fsdp_size=1: every rank has the whole model; 1 rank(s) of the trainer, fsdp2\n")
    starts = []
    for state in ("loaded", "not loaded"):
        with (
            tempfile.TemporaryDirectory() as directory,
            running(run_trainer, options, pathlib.Path(directory), state == "loaded") as trainer,
            running(run_engine, options, pathlib.Path(directory)) as (start, engine),
        ):
            print_start(state, start, trainer, engine)
            starts.append((start, trainer))
    start, trainer = starts[0]
    if start.refusal:
        print_remedies(start, trainer)
    raise SystemExit(1 if start.refusal else 0)


if __name__ == "__main__":
    main()
