"""``fsdp-doctor memory rollout``: a rollout engine's start beside a trainer's worker."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from fsdp_doctor.bench.request import STRATEGIES
from fsdp_doctor.cli import files, starting, values
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.machine import devices, imports
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES

NAME = "rollout"
_SHARDINGS = ("size1", "full")
_DTYPES = ("bf16", "fp32")
EXIT_CODES = (
    "Exit codes: 0 the engine started beside the loaded model; 1 it was refused; 2 usage; 3 cannot run here; "
    "4 the doctor's own fault."
)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    PANEL: ClassVar[str] = "Trainer"

    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODEL_SHAPES)}; or the directory of a Hugging Face configuration.")
    ] = "small"
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers, instead of the model's own.")] = None
    strategy: Annotated[str, typer.Option(help=f"{', '.join(STRATEGIES)}.")] = "fsdp2"
    sharding: Annotated[str, typer.Option(help=f"{', '.join(_SHARDINGS)}.")] = "size1"
    dtype: Annotated[str, typer.Option(help=f"Of the trainer's parameters: {', '.join(_DTYPES)}.")] = "bf16"
    nproc: Annotated[int, typer.Option(help="Number of ranks of the trainer; the engine is on the first device.")] = 1

    def check(self) -> None:
        values.words("--strategy", [self.strategy], STRATEGIES, "")
        values.words("--sharding", [self.sharding], _SHARDINGS, "")
        values.words("--dtype", [self.dtype], _DTYPES, "")
        if self.model not in MODEL_SHAPES:
            values.model_directory(self.model, MODEL_SHAPES)
        if self.layers is not None:
            values.positive("--layers", self.layers)
        values.positive("--nproc", self.nproc)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    PANEL: ClassVar[str] = "Engine"

    gpu_memory_utilization: Annotated[
        float, typer.Option(help="The share of the device's memory that the engine wants.")
    ] = 0.8
    device: Annotated[str, typer.Option(help=f"One of {', '.join(devices.NAMES)}.")] = "auto"
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that each device has, for example 24GiB.")
    ] = None

    def check(self) -> None:
        values.device(self.device)
        if not 0 < self.gpu_memory_utilization <= 1:
            given = f"{self.gpu_memory_utilization:g}"
            raise UsageError(f"--gpu-memory-utilization must be more than 0 and at most 1, not {given}")


def run(
    *,
    trainer: TrainerOptions,
    engine: EngineOptions,
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write all ledgers.")] = None,
) -> None:
    """Start a rollout engine beside a trainer's worker: what each holds, and whether the engine's share is free.

    The engine is a stand-in: it asks for its share of the device's memory as vLLM does, and holds weights and a cache.
    It is started beside a worker that has loaded the FSDP model, and beside one that has not.
    """
    trainer.check()
    engine.check()
    memory = values.size("--device-memory", engine.device_memory) if engine.device_memory is not None else None
    if json_file is not None:
        files.check_writable(json_file)
    starting.check_versions()
    with imports.of_what_stays():
        from fsdp_doctor.bench.sharded_model import load_trainer
        from fsdp_doctor.memory import rollout
        from fsdp_doctor.plan.meta_model import on_meta

    request = rollout.RolloutRequest(
        model=trainer.model,
        layers=trainer.layers,
        strategy=trainer.strategy,
        sharding="size1" if trainer.sharding == "size1" else "full",
        dtype=trainer.dtype,
        utilization=engine.gpu_memory_utilization,
        device=devices.resolve(engine.device),
        memory=memory,
        ranks=trainer.nproc,
    )
    weights = [parameter.numel() for parameter in on_meta(request.model, request.layers).parameters()]
    attempts = rollout.start_engine_beside_trainer(request, weights, load_trainer)
    sys.stdout.write(rollout.rollout_as_text(request, attempts))
    if json_file is not None:
        files.write(json_file, rollout.rollout_as_json(request, attempts))
    raise SystemExit(EXIT_BAD_VERDICT if attempts[0].start.refusal else EXIT_OK)
