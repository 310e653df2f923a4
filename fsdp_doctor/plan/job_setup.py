"""A job to plan: how its models are sharded and trained, the rollout engine, and the machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.matrix.cases import Scenario

BF16, FP32 = 2, 4
# The head after the last layer: logits of the vocabulary, or one value for each token.
ModelHead: TypeAlias = Literal["language", "value"]


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Bytes of an element: of the optimizer's shards, of what is gathered and computed, of what is reduced."""

    master: int = FP32
    compute: int = BF16
    reduce: int = FP32


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """One model of a job.

    scenario: its strategy and offload. shard_ranks: ranks of one shard group. replicas: number of shard groups.
    trains: else it only runs forward. sequences, length: the batch of one forward. checkpointing: of activations.
    moments: tensors of the parameters' size that the optimizer keeps. path: of the matrix, by which its weights are
    extracted; empty if they are not.
    extracted_bytes: of an element as the path yields it, None for that of the shards.
    """

    role: str
    scenario: Scenario
    shard_ranks: int
    replicas: int = 1
    head: ModelHead = "language"
    trains: bool = True
    sequences: int = 1
    length: int = 1024
    checkpointing: bool = False
    dtypes: Dtypes = Dtypes()
    moments: int = 2
    path: str = "full_tensors"
    extracted_bytes: int | None = None

    @property
    def stays_on_host(self) -> bool:
        """Whether the shards stay on the host under a policy although the module is moved.

        FSDP2 pins them again there, and so takes them back; unpinned, they stay where they were moved to.
        """
        scenario = self.scenario
        return scenario.policy and (scenario.version == 1 or scenario.pinning == "pinned")

    @property
    def computes_with_shards(self) -> bool:
        """FSDP1 without shards, in the dtype that is computed in: nothing is copied when a unit is unsharded."""
        is_whole = self.scenario.version == 1 and self.shard_ranks == 1
        return is_whole and self.dtypes.master == self.dtypes.compute

    @property
    def views_hold_shards(self) -> bool:
        """Whether the modules' parameters are views of the flat parameter, whose memory they hold when it is moved.

        With the original parameters FSDP1 makes new ones.
        """
        return self.computes_with_shards and self.scenario.strategy == "fsdp1"

    @property
    def shards_on_host(self) -> bool:
        """Whether the shards are on the host when the weights are extracted."""
        scenario = self.scenario
        is_moved = scenario.staging == "staged" and not self.stays_on_host
        return not is_moved and (scenario.policy or scenario.param_offload)


# Stated constants: what is on a device and no allocator of torch's counts, for each process. On an H200 with torch 2.11
# `fsdp-doctor memory rollout` shows 0.51 GiB of a process without NCCL, and 1.15 GiB of one with it.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 640 << 20
# vLLM asleep at level 2: 1.19 GiB of Qwen3-4B in vLLM's issue 28714.
ASLEEP_BYTES = 1200 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """A rollout engine, bfloat16. bucket_bytes: in which it is given its weights.

    is_apart: whether it is on devices of its own, and not on the trainer's. sleeps: whether it gives its share back
    while the trainer works. loads_model: whether the worker that it
    belongs to there loads the FSDP model, too, which it never uses (verl issue 4229).
    """

    utilization: float
    bucket_bytes: int
    tensor_parallel: int = 1
    is_apart: bool = False
    sleeps: bool = True
    loads_model: bool = False


@dataclass(frozen=True, kw_only=True)
class Machines:
    """gpus: of each node. gpu_memory: bytes of each. host_memory: bytes of each node, None where nothing says it."""

    gpus: int
    nodes: int
    gpu_memory: int
    host_memory: int | None = None

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """models: by role, a named shape or a directory. saved_whole: the roles whose checkpoint is gathered on rank 0's
    host. unread: what of the configuration is not in the plan.
    """

    framework: str
    machines: Machines
    roles: tuple[RoleSetup, ...]
    models: tuple[str, ...]
    engine: EngineSetup | None = None
    layers: int | None = None
    saved_whole: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def setup_of(self, role: str) -> RoleSetup:
        return next(setup for setup in self.roles if setup.role == role)

    def with_role(self, number: int, role: RoleSetup) -> JobSetup:
        return dataclasses.replace(self, roles=(*self.roles[:number], role, *self.roles[number + 1 :]))
