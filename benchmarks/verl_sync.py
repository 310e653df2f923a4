"""Times a sync of weights with verl's own sender and with the fix ``verl-sender``, in verl's FSDP engine.

    torchrun --nproc-per-node 2 benchmarks/verl_sync.py --device cuda --model qwen3-4b --dtype bf16,fp32

A sync has the steps of verl's ActorRolloutRefWorker.update_weights: the engine's ``get_per_tensor_param``, verl's
BucketedWeightSender with the bucket of verl's configuration, BucketedWeightReceiver in another process on the same
device, which copies the weights into its own tensors, and the offload of the parameters. The bucket is sent through
CUDA IPC or, on the emulated device, through shared memory.

- ``generator`` is ``get_per_tensor_param`` alone, with every tensor dropped at once.
- ``first`` is the time of the first call; the other times are medians of the later calls. Each call counts with the
  time of the slowest rank. GB/s are computed from the sent bytes.
- ``+MiB`` is a rank's peak of device memory, without the memory allocated before and without the receiver's memory.
- ``link`` gives the least possible times in which the ranks gather the same bytes from device memory, and copy their
  shards of these bytes from pinned memory.

The model has the named shape and random weights, and has trained a step. The tensors of the two senders are compared
with each other, and the receiver's tensors with the sent tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import os
import pathlib
import shutil
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from ranks import join_group, make_shared_directory

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from verl_receiver import Receiver, Sums, add_up, load_transfer

from fsdp_doctor.fixes.applying import hold_fix
from fsdp_doctor.frameworks.adapter import PlainModel, Shims
from fsdp_doctor.frameworks.framework_worker import find_adapter
from fsdp_doctor.machine.launch import Place, read_place
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix

_T = TypeVar("_T")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Layers, hidden size, intermediate size, heads, heads of keys and values, head size, vocabulary.
_SHAPES = {"small": (4, 64, 128, 4, 2, 16, 512), "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936)}
_PIECE_BYTES = 2**30
# A call that takes longer is repeated once.
_LONG_S = 3


def main() -> None:
    options = make_parser().parse_args()
    started = time.monotonic()
    join_group(options.device)
    place = read_place()
    # The receiver imports verl at the same time.
    receiver = make_receiver(options, place, use_shm=options.device != "cuda")
    adapter = find_adapter("verl")
    adapter.preload()
    bench = Bench(options, place, receiver)
    if options.device == "emulated":
        adapter.prepare_emulated_device(Shims("verl", read_matrix("verl").shims))
    bench.start_receiver()
    bench.print_head()
    rows = itertools.product(options.strategy, options.dtype, options.offload)
    with make_shared_directory(None) as directory:
        for number, (strategy, dtype, offload) in enumerate(rows):
            if strategy == "fsdp" and offload == "policy":
                continue
            if max(gather(time.monotonic() - started)) > options.seconds:
                bench.print(f"{strategy} {dtype} {offload}: not measured, {options.seconds:.0f} seconds are over")
                continue
            workspace = directory / str(number)
            workspace.mkdir(exist_ok=True)
            bench.measure(workspace, strategy, dtype, offload)
    bench.stop_receiver()
    # The device's threads may still hold CUDA IPC memory; nothing is left to save.
    gather(None)
    sys.stdout.flush()
    os._exit(0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def read_words(text: str) -> list[str]:
        return text.split(",")

    add = parser.add_argument
    add("--device", choices=["cuda", "emulated"], default="emulated")
    add("--model", choices=list(_SHAPES), default="small")
    add("--dtype", type=read_words, default=["bf16"], help=f"of the shards: {', '.join(_DTYPES)}")
    add("--strategy", type=read_words, default=["fsdp2", "fsdp"])
    add("--offload", type=read_words, default=["none", "policy", "param+optimizer"])
    add("--repeat", type=int, default=3, help="calls after the first one")
    add("--seconds", type=float, default=3600, help="no row begins after this time")
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapedModel(PlainModel):
    """A model of a given shape, without a file of weights."""

    config: transformers.PretrainedConfig

    def write_pretrained(self) -> pathlib.Path:
        directory = self.workspace / f"config-{self.place.rank}"
        directory.mkdir(exist_ok=True)
        self.config.to_json_file(directory / "config.json")
        return directory

    def make_batch(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.place.rank + number)
        return torch.randint(0, self.config.vocab_size, (2, 16), generator=generator)


def gather(value: _T) -> list[_T]:
    """Returns the value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def make_receiver(options: argparse.Namespace, place: Place, *, use_shm: bool) -> Receiver:
    return Receiver(place.local_rank if options.device == "cuda" else None, use_shm)


class Bench:
    def __init__(self, options: argparse.Namespace, place: Place, receiver: Receiver) -> None:
        from verl.workers.config import CheckpointEngineConfig

        self.options = options
        self.place = place
        self.device = torch.device(options.device, place.local_rank)
        self.on_device: Any = torch.get_device_module(self.device)
        self.versions = read_installed_versions(["verl", "torch", "transformers"])
        self.bucket_mb: int = CheckpointEngineConfig(backend="naive").update_weights_bucket_megabytes
        self.transfer = self._load_transfer()
        self.receiver: Receiver | None = receiver

    def _load_transfer(self) -> types.ModuleType:
        return load_transfer(None if self.options.device == "cuda" else self.on_device.synchronize)

    def print(self, text: str) -> None:
        if self.place.rank == 0:
            print(text, flush=True)

    def print_head(self) -> None:
        receiver = self.receiver
        how = "no receiver" if receiver is None else "shared memory" if receiver.use_shm else "CUDA IPC"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        name = torch.cuda.get_device_name() if self.options.device == "cuda" else "the emulated device"
        self.print(f"{self.options.model}, {versions}, {dist.get_world_size()} ranks of {name}")
        self.print(f"bucket of {self.bucket_mb} MiB through {how}; {self.options.repeat} calls after the first")
        for module in ("ray", "pandas", "datasets"):
            if "stand-in" in (getattr(sys.modules.get(module), "__doc__", None) or ""):
                self.print(f"note: {module} is an empty stand-in, only so that verl can be imported")
        titles = f"{'':40}{'generator':>26}{'first':>8}{'+MiB':>8}   {'sync':>17}{'first':>16}{'+MiB':>8}"
        self.print(f"{titles}   sent, slowest rank")

    def start_receiver(self) -> None:
        """Starts the receiver, and sends it a small tensor: through CUDA IPC, else through shared memory."""
        for use_shm in (False, True) if self.options.device == "cuda" else (True,):
            if use_shm and self.options.device == "cuda" and not self.has_room():
                self.print("no receiver: /dev/shm is too small for the buckets of all ranks")
                return
            self.receiver = self.receiver or make_receiver(self.options, self.place, use_shm=use_shm)
            error = None
            try:
                self.receiver.wait()
                self._send([("trial", torch.ones(8, device=self.device))])
                sums = self.receiver.ask("sum")
                if sums != {"trial": add_up(torch.ones(8))}:
                    raise RuntimeError("the receiver holds other values")
                self.receiver.ask("forget")
            except Exception as raised:
                error = describe(raised)
            errors = [each for each in gather(error) if each]
            if not errors:
                return
            self.print(f"the receiver does not work with {'shared memory' if use_shm else 'CUDA IPC'}: {errors[0]}")
            self.stop_receiver()

    def has_room(self) -> bool:
        return shutil.disk_usage("/dev/shm").free > dist.get_world_size() * self.bucket_mb * 2**20

    def stop_receiver(self) -> None:
        if self.receiver is not None:
            self.receiver.stop()
            self.receiver = None

    def _send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        receiver = self.receiver
        assert receiver is not None
        receiver.tell("receive")
        sender = self.transfer.BucketedWeightSender(
            zmq_handle=receiver.handle, bucket_size_mb=self.bucket_mb, use_shm=receiver.use_shm
        )
        with torch.no_grad():
            asyncio.run(sender.async_send_weights(tensors))
        receiver.wait()

    def build(self, workspace: pathlib.Path, strategy: str, dtype: str, offload: str) -> Any:
        """Lets verl build its engine around a new model, trains a step and offloads. Returns verl's engine."""
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        layers, hidden, intermediate, heads, key_heads, head_size, vocabulary = _SHAPES[self.options.model]
        config = transformers.Qwen3Config(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_size,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
            architectures=["Qwen3ForCausalLM"],
        )

        def build_module(engine: Any) -> torch.nn.Module:
            # verl reads a file into the host's memory; here, nothing is to be read.
            torch.manual_seed(0)
            with self.device if self.options.device == "cuda" else torch.device("cpu"):
                module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
                    engine.model_config.hf_config, dtype=_DTYPES[dtype]
                )
            return module

        shaped = ShapedModel(
            name="qwen3", weights="own", device=self.device, place=self.place, workspace=workspace, config=config
        )
        configuration = {"strategy": strategy, "offload": offload, "lora": "apart"}
        with mock.patch.object(FSDPEngine, "_build_module", build_module):
            session: Any = find_adapter("verl").build(configuration, shaped)
        session.step(shaped.make_batch(0))
        session.offload()
        return session._engine

    def measure(self, workspace: pathlib.Path, strategy: str, dtype: str, offload: str) -> None:
        """Prints a row of each sender, on the same engine."""
        what = f"{strategy} {dtype} {offload}"
        started = time.monotonic()
        with self.report_failure(what, "build") as built:
            engine = self.build(workspace, strategy, dtype, offload)
        if built.failed:
            return
        self.print(f"{what}: built and trained in {time.monotonic() - started:.1f} s")
        rows: dict[bool, Row] = {}
        # The fix is first, because verl 0.7.1 raises under the policy, and leaves the model half moved.
        for fixed in (True, False):
            who = "the fix" if fixed else f"verl {self.versions['verl']}"
            with self.report_failure(what, who) as done, hold_fix("verl-sender") if fixed else contextlib.nullcontext():
                rows[fixed] = self.measure_sender(engine)
            if not done.failed:
                self.print(f"{what:28}{who:12}{rows[fixed]}")
        if len(rows) == 2:
            self.print(f"{what:28}{compare_rows(rows[True], rows[False])}")
        with self.report_failure(what, "link"):
            for row in list(rows.values())[:1]:
                self.print(f"{what:28}{self.describe_link(row.nbytes, offload)}")
            if self.receiver is not None:
                self.receiver.ask("forget")
        del engine
        gc.collect()
        self.on_device.empty_cache()

    @contextlib.contextmanager
    def report_failure(self, what: str, who: str) -> Iterator[types.SimpleNamespace]:
        """Prints the exceptions that the block raised on any rank, and starts another receiver."""
        result = types.SimpleNamespace(failed=False)
        error = None
        try:
            yield result
        except Exception as raised:
            error = describe(raised)
        errors = [each for each in gather(error) if each]
        if errors:
            result.failed = True
            self.print(f"{what:28}{who:12}{errors[0]}")
            gc.collect()
            if self.receiver is not None:
                self.stop_receiver()
                self.start_receiver()

    def measure_sender(self, engine: Any) -> Row:
        def read() -> Iterable[tuple[str, torch.Tensor]]:
            # As verl's worker asks for them.
            tensors: Iterable[tuple[str, torch.Tensor]]
            tensors, _ = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
            return tensors

        @torch.no_grad()
        def drain() -> None:
            for _ in read():
                pass

        def sync() -> None:
            self._send(read())
            offload()

        def offload() -> None:
            if engine.is_param_offload_enabled:
                engine.to("cpu", model=True, optimizer=False, grad=False)

        drained = self.time(drain, offload)
        synced = self.time(sync) if self.receiver is not None else None
        sums, nbytes = {}, 0
        for name, tensor in read():
            sums[name] = add_up(tensor)
            nbytes += tensor.nbytes
        offload()
        received = self.receiver.ask("sum") if self.receiver is not None else sums
        return Row(drained, synced, nbytes, gather(sums), gather(received))

    def time(self, run: Callable[[], None], after: Callable[[], None] = lambda: None) -> Timing:
        """Times a call and its repetitions on the slowest rank. Raises FailedCall on every rank or on no rank."""
        seconds: list[float] = []
        peaks: list[int] = []
        while len(seconds) <= (self.options.repeat if not seconds or seconds[0] < _LONG_S else 1):
            gc.collect()
            if self.options.device == "cuda":
                torch.cuda.ipc_collect()
            self.on_device.empty_cache()
            self.on_device.synchronize()
            self.on_device.reset_peak_memory_stats()
            before = self.on_device.memory_allocated()
            gather(None)
            start = time.perf_counter()
            error = None
            try:
                run()
                self.on_device.synchronize()
            except Exception as raised:
                error = describe(raised)
            elapsed = time.perf_counter() - start
            ranks = gather((error, elapsed, self.on_device.max_memory_allocated() - before))
            if errors := [f"rank {rank}: {each}" for rank, (each, *_) in enumerate(ranks) if each]:
                raise FailedCall(errors[0])
            seconds.append(max(each for _, each, _ in ranks))
            peaks.append(max(peak for *_, peak in ranks))
            after()
        return Timing(seconds[0], statistics.median(seconds[1:]), max(peaks[1:]))

    def describe_link(self, nbytes: int, offload: str) -> str:
        """Describes how long the ranks take to gather ``nbytes``, and to copy their shards of them from the host."""
        world_size = dist.get_world_size()
        shard_bytes = max(nbytes // world_size, 1)
        calls = -(-shard_bytes // _PIECE_BYTES)
        shard = torch.zeros(shard_bytes // calls, dtype=torch.uint8, device=self.device)
        full = torch.empty(shard.numel() * world_size, dtype=torch.uint8, device=self.device)

        def gather_shards() -> None:
            for _ in range(calls):
                dist.all_gather_into_tensor(full, shard)

        gathered = self.time(gather_shards).later
        text = f"link: all-gather {describe_time(gathered, nbytes)}"
        if offload != "none":
            host = torch.zeros(shard.numel(), dtype=torch.uint8)
            host = host.pin_memory() if self.options.device == "cuda" else host

            def copy_shards() -> None:
                for _ in range(calls):
                    shard.copy_(host, non_blocking=True)

            text += f"; shards from pinned memory {describe_time(self.time(copy_shards).later, nbytes)} of the whole"
        return text


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the first call, median seconds of the later calls, and the later calls' peak of device memory."""

    first: float
    later: float
    peak: int


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of a sender.

    synced: the times of the whole sync; None if there is no receiver.
    sent, received: the sums of the sent and of the received tensors, for each rank.
    """

    drained: Timing
    synced: Timing | None
    nbytes: int
    sent: list[Sums]
    received: list[Sums]

    def __str__(self) -> str:
        text = describe_timing(self.drained, self.nbytes)
        if self.synced is not None:
            text += "   " + describe_timing(self.synced, self.nbytes)
        return f"{text}   {self.nbytes / 1e9:.3f} GB, {len(self.sent[0])} tensors"


class FailedCall(Exception):
    """Raised on every rank if a call has raised on any rank."""


def describe(error: Exception) -> str:
    if isinstance(error, FailedCall):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def describe_time(seconds: float, nbytes: int) -> str:
    return f"{seconds * 1e3:.1f} ms, {nbytes / seconds / 1e9:.1f} GB/s"


def describe_timing(timing: Timing, nbytes: int) -> str:
    speed = nbytes / timing.later / 1e9
    return f"{timing.later * 1e3:9.1f} ms{speed:7.1f} GB/s{timing.first * 1e3:8.0f}{timing.peak / 2**20:8.0f}"


def compare_rows(fixed: Row, own: Row) -> str:
    text = f"verl / fix: generator {own.drained.later / fixed.drained.later:.2f}"
    if fixed.synced is not None and own.synced is not None:
        text += f", sync {own.synced.later / fixed.synced.later:.2f}"
    sums = own.sent[0]
    others = {
        "the fix sends": fixed.sent,
        "verl's receiver holds": own.received,
        "the fix's receiver holds": fixed.received,
    }
    problems = [] if all(each == sums for each in own.sent) else ["THE RANKS OF VERL SEND DIFFERENT VALUES"]
    for who, of_ranks in others.items():
        for rank, found in enumerate(of_ranks):
            different = [name for name in sums.keys() & found.keys() if sums[name] != found[name]]
            if different:
                problems.append(f"DIFFERENT: {who} other values on rank {rank}: {len(different)}, {different[0]}")
            if names := sums.keys() ^ found.keys():
                problems.append(f"{who} other names on rank {rank}: {len(names)}, {min(names)}")
    return f"{text}; values: {'; '.join(problems) or f'all {len(sums)} equal'}"


if __name__ == "__main__":
    main()
