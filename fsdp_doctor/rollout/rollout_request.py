"""What a rollout engine is started beside, and what each of the processes says. Read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.ledgers.stage_ledger import StageLedger

# The trainer's worker has loaded the FSDP model, or it has not and only has its context.
Beside: TypeAlias = Literal["loaded", "not loaded"]
Cut: TypeAlias = Literal["size1", "full"]

CUTS: dict[Cut, str] = {
    "size1": "fsdp_size=1: every rank has the whole model",
    "full": "one shard group over all ranks",
}


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """model: a named shape, or a directory with a config.json. layers: instead of the model's own number.

    dtype: of the trainer's parameters, ``bf16`` or ``fp32``; the engine's weights are bfloat16.
    utilization: the share of the device's memory that the engine asks for.
    device: its type. memory: bytes that a device has, None for all that there are. ranks: of the trainer.
    """

    model: str
    layers: int | None
    strategy: str
    cut: Cut
    dtype: str
    utilization: float
    device: str
    memory: int | None
    ranks: int


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """How the engine's start ended.

    free, total: bytes of the device when it asked. requested: what it asked for. weights: of the model, unsharded.
    refusal: in vLLM's words; empty where it started.
    """

    free: int
    total: int
    requested: int
    weights: int
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the engine: what the trainer's worker on its device held, how it ended, and what it held then."""

    beside: Beside
    trainer: StageLedger
    engine: StageLedger
    start: EngineStart
