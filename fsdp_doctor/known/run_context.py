"""Facts about a run that decide which of its cases fail: torch, the device, the ranks, the packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.matrix.axes import Model, Sharding
from fsdp_doctor.matrix.cases import Scenario

DeviceKind: TypeAlias = Literal["cpu", "emulated", "accelerator"]
Shards: TypeAlias = Literal["even", "uneven"]
CopyCompletion: TypeAlias = Literal["at once", "late", "at any time"]

# By model, the number by which the first dimension of every parameter can be divided where its dims are even.
EVEN_DIMS: dict[Model, int] = {
    Model.QWEN3: 16,
    Model.QWEN3_TIED: 16,
    Model.QWEN3_BUFFERS: 16,
    Model.QWEN2: 32,
    Model.QWEN3_MOE: 4,
    Model.QWEN3_5: 4,
    Model.QWEN3_LORA: 4,
    Model.QWEN3_QLORA: 4,
    Model.QWEN3_QLORA_BF16: 4,
    Model.QWEN3_FLOAT8: 16,
    Model.QWEN3_MXFP8: 16,
}


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The facts about a run on which the triggers of the catalogue depend.

    torch: the version of torch; empty if it is not known, and then every version applies.
    device: the type of device as in ``torch.device``; every type except ``cpu`` and ``emulated`` is an accelerator.
    world_size: the number of ranks.
    late_completion: whether the emulated device's non-blocking copies finish late.
    packages: the versions of installed distributions; a distribution that is missing here has an unknown version.
    """

    torch: str = ""
    device: str = "cuda"
    world_size: int = 2
    late_completion: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def device_kind(self) -> DeviceKind:
        match self.device:
            case "cpu":
                return "cpu"
            case "emulated":
                return "emulated"
            case _:
                return "accelerator"

    @property
    def non_blocking_copies(self) -> CopyCompletion:
        """Returns the moment at which a non-blocking copy to the host finishes, which on an accelerator depends on a
        race.
        """
        match self.device_kind:
            case "cpu":
                return "at once"
            case "emulated":
                return "late" if self.late_completion else "at once"
            case "accelerator":
                return "at any time"
            case kind:
                assert_never(kind)

    def shard_group(self, scenario: Scenario) -> int:
        """Returns the number of ranks over which a parameter is sharded."""
        match scenario.sharding:
            case Sharding.FULL | Sharding.EXPERTS | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
                return self.world_size
            case Sharding.TP:
                return max(1, self.world_size // 2)
            case Sharding.HSDP:
                return 2
            case Sharding.SIZE1 | Sharding.REPLICATE:
                return 1
            case sharding:
                assert_never(sharding)

    def list_possible_shards(self, scenario: Scenario) -> tuple[Shards, ...]:
        """Returns ``even`` if all ranks' shards of a parameter have one size, otherwise ``uneven``; both for a user's
        model.
        """
        group = self.shard_group(scenario)
        if group == 1:
            return ("even",)
        if scenario.model.is_custom:
            return ("even", "uneven")
        return ("even",) if scenario.dims.is_even and EVEN_DIMS[scenario.model] % group == 0 else ("uneven",)
