"""Measures the ledgers of models with real shapes at each stage, and records other tools' estimates of the same steps.

    torchrun --nproc-per-node 2 benchmarks/memory_stages.py --json stages.json [--shape qwen3-4b qwen3-30b-a3b]

Writes a file of ledgers as ``fsdp-doctor memory measure --json`` does. Each model's ledgers are added when they are
measured, so that they are kept if the time runs out: no model is begun after ``--seconds``. A job's name is
``shape/layers/strategy/offload/batch x sequence/checkpointing or activations``. The first job of each model has all
stages, the others have only "trained".

``estimates`` has three numbers for each job: the peak that the device counted in "trained"; the peak of torch's
FSDPMemTracker, for FSDP2 without an offload; and the result of accelerate's estimate-memory for AdamW in bfloat16,
which considers neither shards nor activations, also divided by the ranks.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import pathlib
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from bench import sharded_model
from torch import nn

from fsdp_doctor.case import models, runtime
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.examination.memory_records import MemoryFile, StageMemory, format_memory_file, read_memory_file
from fsdp_doctor.examination.stage_watch import StageWatch
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.environment import collect
from fsdp_doctor.machine.launch import read_place
from fsdp_doctor.matrix.axes import Backend
from fsdp_doctor.matrix.cases import Scenario, make_scenario
from fsdp_doctor.matrix.model_shapes import MODEL_SHAPES
from fsdp_doctor.matrix.training_size import TrainingSize
from fsdp_doctor.plan.meta_model import build_on_meta
from fsdp_doctor.probe.worker import import_what_cases_need
from fsdp_doctor.weights.extract import full_tensors

# A layer of the mixture of experts has 0.6 billion parameters. Its four layers leave room for AdamW on two devices.
_LAYERS = {"qwen3-4b": 36, "qwen3-30b-a3b": 4, "qwen3-0.6b": 28, "small": 4}
_METHOD = "full_tensors"
MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Model:
    """A model that is measured in a separate process."""

    offload: str
    shape: str
    strategy: str

    @property
    def name(self) -> str:
        return f"{self.shape}/{_LAYERS[self.shape]}/{self.strategy}/{self.offload}"

    @property
    def scenario(self) -> Scenario:
        staging = "staged" if "param" in self.offload else "unstaged"
        return make_scenario({"strategy": self.strategy, "offload": self.offload, "staging": staging})

    def job(self, training: TrainingSize) -> str:
        kept = "checkpointing" if training.checkpointing else "activations"
        return f"{self.name}/{training.batch}x{training.sequence}/{kept}"


class ShapeTrainer(Trainer):
    """A trainer for a model with a real shape and fp32 shards."""

    shape = "small"

    def _build_sharded_model(self, weights: models.Weights) -> nn.Module:
        policy = "policy" if self.scenario.policy else "none"
        mesh = self.runtime.make_mesh(self.scenario.sharding)
        whole = build_on_meta(self.shape, _LAYERS[self.shape], dtype=torch.float32)
        return sharded_model.shard_model(whole, self.scenario.change(offload=policy), mesh)

    def resize(self, training: TrainingSize) -> None:
        """Sets the size of the next steps."""
        self.runtime.training = training
        inner: Any = self.model if self.scenario.version == 2 else self.model.module
        if training.checkpointing:
            models.checkpoint_activations(inner)
        else:
            inner.gradient_checkpointing_disable()


def measured(
    model: Model, steps: list[TrainingSize], at: Runtime
) -> tuple[list[StageMemory], dict[str, dict[str, int]]]:
    """Measures the ledgers and the estimates of a model's steps. Every rank must call this function."""
    scenario = model.scenario
    at.training, ShapeTrainer.shape = steps[0], model.shape
    watch = StageWatch(model.job(steps[0]), at.rank, at.device)
    with watch.measure_stage("built"):
        trainer = ShapeTrainer(scenario, at)
        watch.set_model(trainer.model, trainer.optimizer)
    trainer.resize(steps[0])
    with watch.measure_stage("first step"):
        trainer.step()
    ledgers, estimates = list(watch.take()), {}
    for training in steps:
        trainer.resize(training)
        job = model.job(training)
        with watch.measure_stage("trained"):
            trainer.step()
        ledgers += [replace(memory, job=job) for memory in watch.take()]
        device = ledgers[-1].device
        assert device is not None
        estimates[job] = {"measured": device.peak, **estimated(model.shape, trainer, at.world_size)}
    trainer.resize(steps[0])
    with watch.measure_stage("offloaded"):
        trainer.offload()
    if scenario.staging.is_staged:
        with watch.measure_stage("staged"):
            trainer.stage()
    with watch.measure_stage("extracted", _METHOD):
        for _, tensor in watch.count_outputs(full_tensors(trainer.model, dtype=torch.bfloat16)):
            del tensor
    with watch.measure_stage("offloaded again", _METHOD):
        trainer.unstage(undo_staging=True)
    with watch.measure_stage("loaded", _METHOD):
        trainer.load()
    if scenario.param_offload:
        with watch.measure_stage("trained again", _METHOD):
            trainer.step()
    return [*ledgers, *watch.take()], estimates


def estimated(shape: str, trainer: ShapeTrainer, world_size: int) -> dict[str, int]:
    whole = of_accelerate(shape)
    found = {"accelerate estimate-memory": whole, "accelerate estimate-memory / ranks": whole // world_size}
    if trainer.scenario.version == 2 and not trainer.scenario.offload:
        found |= of_fsdp_mem_tracker(trainer)
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def of_accelerate(shape: str) -> int:
    """Returns the estimate of accelerate in bytes; 0 if accelerate is not installed."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return 0
    model = build_on_meta(shape, _LAYERS[shape], dtype=torch.float32)
    return int(max(estimate_training_usage(calculate_maximum_sizes(model)[0], "bfloat16").values()))


def of_fsdp_mem_tracker(trainer: ShapeTrainer) -> dict[str, int]:
    """Returns the estimate of FSDPMemTracker over two steps, as in torch's test of it; empty if FSDPMemTracker raises.

    The optimizer state is created in the first step.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(trainer.model, trainer.optimizer)
    try:
        with tracker:
            trainer.step()
            tracker.reset_mod_stats()
            trainer.step()
        snapshot = tracker.get_tracker_snapshot("peak")[trainer.runtime.device]
    except Exception as error:
        print(f"FSDPMemTracker: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return {}
    return {f"FSDPMemTracker {getattr(kind, 'value', kind)}": int(nbytes) for kind, nbytes in snapshot.items()}


def measure(model: Model, options: argparse.Namespace) -> None:
    """Measures a model in this process, which begins with an empty device. Rank 0 adds the results to the file."""
    at = started(model, options)
    sizes = itertools.product(options.sequence, (True, False))
    steps = [TrainingSize(batch=options.batch, sequence=length, checkpointing=kept) for length, kept in sizes]
    ledgers, estimates = measured(model, steps if model.offload == "none" else steps[:1], at)
    everyone: list[Any] = [None] * at.world_size
    dist.all_gather_object(everyone, ledgers, group=at.control)
    if at.rank == 0:
        file = read_memory_file(options.json.read_text())
        found = tuple(ledger for of_rank in everyone for ledger in of_rank)
        file = replace(file, ledgers=(*file.ledgers, *found), estimates={**file.estimates, **estimates})
        options.json.write_text(format_memory_file(file))
    dist.barrier(group=at.control)
    os._exit(0)


def started(model: Model, options: argparse.Namespace) -> Runtime:
    store, _, _ = next(dist.rendezvous("env://"))
    device = devices.RunDevice(type=devices.resolve(options.device), late_completion=False)
    return runtime.start(
        dist.PrefixStore(model.name, store),
        place=read_place(),
        run_device=device,
        backend=Backend.MIXED,
        scratch=pathlib.Path("."),
        custom_model=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--shape", nargs="+", default=["qwen3-4b", "qwen3-30b-a3b"], choices=MODEL_SHAPES)
    parser.add_argument("--strategy", nargs="+", default=["fsdp2", "fsdp1"])
    parser.add_argument("--offload", nargs="+", default=["none", "policy", "param+optimizer"])
    parser.add_argument("--sequence", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()

    began = time.monotonic()
    rank = read_place().rank
    import_what_cases_need()
    devices.load(devices.RunDevice(type=devices.resolve(options.device)), options.device)
    # Each rank starts its own processes, because it can only wait for processes that it has started.
    store = dist.PrefixStore("parents", next(dist.rendezvous("env://"))[0])
    if rank == 0:
        options.json.write_text(format_memory_file(empty_file(options)))
    forks = multiprocessing.get_context("fork")
    # The offloads are in the order of the time that they take.
    for model in map(Model, *zip(*itertools.product(options.offload, options.shape, options.strategy), strict=True)):
        if rank == 0:
            store.set(model.name, "go" if time.monotonic() - began < options.seconds else "")
        if not store.get(model.name):
            note(options, rank, f"{model.name}: not measured: {options.seconds:g} seconds were over")
            continue
        process = forks.Process(target=measure, args=(model, options))
        process.start()
        process.join(MOST_SECONDS)
        if process.exitcode != 0:
            process.kill()
            note(options, rank, f"{model.name}: not measured: rank {rank} ended with {process.exitcode}")
        if rank == 0:
            print(f"{time.monotonic() - began:6.1f} s  {model.name}", flush=True)


def empty_file(options: argparse.Namespace) -> MemoryFile:
    facts = collect()
    accelerators = facts["accelerators"] or [devices.resolve(options.device)]
    return MemoryFile(
        origin="measured",
        command=" ".join(["benchmarks/memory_stages.py", *sys.argv[1:]]),
        device=f"{read_place().world_size} x {accelerators[0]}",
        ledgers=(),
        packages=facts["packages"],
    )


def note(options: argparse.Namespace, rank: int, sentence: str) -> None:
    if rank == 0:
        file = read_memory_file(options.json.read_text())
        options.json.write_text(format_memory_file(replace(file, notes=(*file.notes, sentence))))
    print(sentence, file=sys.stderr)


if __name__ == "__main__":
    main()
