"""A job to plan as records: its models, its rollout engine and its machines. No torch."""

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
    """Bytes of an element of the optimizer's shards, of gathered and computed parameters, and of reduced gradients."""

    master: int = FP32
    compute: int = BF16
    reduce: int = FP32


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """One model of a job.

    scenario: its strategy and offload. shard_ranks: ranks of one shard group. replicas: number of shard groups.
    model: a named shape, or a directory with a config.json. layers: instead of the model's own number.
    trains: false if only the forward runs. sequences, length: the batch of one forward. checkpointing: of activations.
    moments: tensors of the parameters' size that the optimizer keeps. method: the method of the matrix with which its
    weights are extracted; empty if they are not. extracted_bytes: bytes of a yielded element, None for those
    of the shards. saved_whole: whether its checkpoint is gathered on rank 0's host.
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
        """Returns whether the shards stay on the host under a policy although the module is moved.

        FSDP2 pins them there again, and so takes them back; unpinned shards stay where they were moved.
        """
        scenario = self.scenario
        return scenario.policy and (scenario.version == 1 or scenario.pinning.is_pinned)

    @property
    def computes_with_shards(self) -> bool:
        """Returns whether FSDP1 copies nothing to unshard a unit: without shards, in the dtype of the computation."""
        is_whole = self.scenario.version == 1 and self.shard_ranks == 1
        return is_whole and self.dtypes.master == self.dtypes.compute

    @property
    def views_hold_shards(self) -> bool:
        """Returns whether the modules' parameters are views that keep the memory of a flat parameter when it is moved.

        With ``use_orig_params`` FSDP1 makes new views, but the views of the last forward keep the memory.
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
    """A rollout engine with bfloat16 weights. bucket_bytes: the size of the buckets in which it receives its weights.
    is_apart: whether it has separate devices. sleeps: whether it gives its share back while the trainer works.
    loads_model: whether the worker of an engine on separate devices loads the FSDP model, too, which it never uses
    (verl issue 4229).
    """

    utilization: float
    bucket_bytes: int
    tensor_parallel: int = 1
    is_apart: bool = False
    sleeps: bool = True
    loads_model: bool = False


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines of a job.

    gpus: devices of a node. gpu_memory: bytes of a device. host_memory: bytes of a node, None if unknown.
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
    """A job. unread: sentences on settings that are not in the plan, and on defaults that were taken."""

    framework: str
    machines: Machines
    roles: tuple[RoleSetup, ...]
    engine: EngineSetup | None = None
    unread: tuple[str, ...] = ()

    def replace_role(self, number: int, role: RoleSetup) -> JobSetup:
        return dataclasses.replace(self, roles=(*self.roles[:number], role, *self.roles[number + 1 :]))
