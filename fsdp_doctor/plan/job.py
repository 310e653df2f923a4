"""Records of a job to plan: its models, its rollout engine and its machines. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Scenario

# More would take too long: each layer is made, and its forward followed.
MOST_LAYERS = 1000
BF16, FP32 = 2, 4
# The head after the last layer: logits of the vocabulary, or one value for each token.
ModelHead: TypeAlias = Literal["language", "value"]


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Bytes of one element.

    master: bytes of an element of the shards that the optimizer updates.
    compute: bytes of an element of the gathered parameters.
    reduce: bytes of an element in gradient reductions.
    """

    master: int = FP32
    compute: int = BF16
    reduce: int = FP32


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """One model of a job.

    scenario: the model's strategy and offload.
    shard_ranks: the number of ranks in one shard group.
    replicas: the number of shard groups.
    model: a named shape, or a directory with a config.json.
    layers: the number of layers; None for the model's own number.
    trains: whether the model is trained; false if only its forward runs.
    sequences: the number of sequences in one forward.
    length: the number of tokens in each sequence.
    checkpointing: whether activation checkpointing is on.
    moments: the number of tensors of the parameters' size that the optimizer keeps.
    method: the matrix method that extracts the weights; empty if they are not extracted.
    extracted_bytes: bytes of an extracted element; None for the dtype of the shards.
    saved_whole: whether the model's checkpoint is gathered on rank 0's host.
    """

    role: str
    scenario: Scenario
    shard_ranks: int
    model: str = "small"
    layers: int | None = None
    replicas: int = 1
    head: ModelHead = "language"
    trains: bool = True
    sequences: int = 1
    length: int = 1024
    checkpointing: bool = False
    dtypes: Dtypes = Dtypes()
    moments: int = 2
    method: str = "full_tensors"
    extracted_bytes: int | None = None
    saved_whole: bool = False

    def __post_init__(self) -> None:
        if self.scenario.offload.way is not None:
            raise UsageError(f"the plan knows verl's offloads, and not {self.scenario.offload}")

    @property
    def stays_on_host(self) -> bool:
        """Returns whether the shards stay on the host under an offload policy when the module is moved to the device.

        FSDP2 moves pinned shards back to the host to pin them again; shards that are not pinned stay on the device.
        """
        scenario = self.scenario
        return scenario.policy and (scenario.version == 1 or scenario.pinning.is_pinned)

    @property
    def computes_with_shards(self) -> bool:
        """Returns whether FSDP1 computes with the flat parameter itself, so that unsharding copies nothing.

        For this, a shard group must have one rank, and the shards must have the dtype of the computation.
        """
        is_whole = self.scenario.version == 1 and self.shard_ranks == 1
        return is_whole and self.dtypes.master == self.dtypes.compute

    @property
    def views_hold_shards(self) -> bool:
        """Returns whether the modules' views keep a flat parameter's device memory alive after the parameter's move.

        They do if FSDP1 computes with the flat parameter itself, without ``use_orig_params``. With
        ``use_orig_params`` the result is False: FSDP1 makes new views, and the views of the last forward, which also
        keep the memory, are not counted here.
        """
        return self.computes_with_shards and not self.scenario.strategy.uses_original_parameters

    @property
    def shards_on_host(self) -> bool:
        """Returns whether the shards are on the host when the weights are extracted."""
        scenario = self.scenario
        is_moved = scenario.staging.is_staged and not self.stays_on_host
        return not is_moved and (scenario.policy or scenario.param_offload)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """A rollout engine with bfloat16 weights.

    utilization: the engine's share of a device's memory, between 0 and 1.
    bucket_bytes: the size of the buckets in which the engine receives its weights.
    is_apart: whether the engine has separate devices.
    sleeps: whether the engine frees its memory while the trainer works.
    loads_model: whether the worker of an engine on separate devices also loads the FSDP model, although it never uses
        the model (verl issue 4229).
    """

    utilization: float
    bucket_bytes: int
    tensor_parallel: int = 1
    is_apart: bool = False
    sleeps: bool = True
    loads_model: bool = False


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a job.

    gpus: the number of devices in a node.
    gpu_memory: bytes of memory of a device.
    host_memory: bytes of host memory of a node; None if unknown.
    """

    gpus: int
    nodes: int
    gpu_memory: int
    host_memory: int | None = None

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """The job to plan.

    unread: sentences on settings that the plan ignores, and on defaults that it uses.
    """

    framework: str
    machines: Machines
    roles: tuple[RoleSetup, ...]
    engine: EngineSetup | None = None
    unread: tuple[str, ...] = ()

    def replace_role(self, number: int, role: RoleSetup) -> JobSetup:
        return dataclasses.replace(self, roles=(*self.roles[:number], role, *self.roles[number + 1 :]))
