"""How one model of a job is held and trained: what a stage's bytes follow from, beside its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.matrix.cases import Scenario

BF16, FP32 = 2, 4
# What comes after the last layer: logits of the vocabulary, or the one value of a critic.
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

    scenario: its strategy and offload; of its sharding here are the numbers. shard_ranks: of one shard group.
    replicas: how many shard groups there are. trains: else it only runs forward.
    sequences, length: what one forward gets. checkpointing: of activations.
    moments: how many tensors of its parameters' size the optimizer keeps. path: by which its weights are taken out;
    none is for a model of which nobody takes them.
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
        """Whether a policy keeps the shards on the host though the module is moved.

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
        """When the weights are taken out."""
        scenario = self.scenario
        is_moved = scenario.staging == "staged" and not self.stays_on_host
        return not is_moved and (scenario.policy or scenario.param_offload)
