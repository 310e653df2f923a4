"""How FSDP's modules reduce their gradients: torch's switches, which stay as whoever set them last has left them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_doctor.fsdp.private.access import get
from fsdp_doctor.fsdp.private.of_torch import fsdp2_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSwitches:
    """Of one unit; the defaults are torch's.

    synchronizes: whether a backward reduces its gradients. all_reduces: over the replicas, too.
    ends: whether a backward is the last before the optimizer's step, at whose end torch waits for what it has reduced.
    divided_by: the text of what a gradient is divided by, where that was set. num_ranks: of its mesh, torch's divisor.
    """

    synchronizes: bool = True
    all_reduces: bool = True
    ends: bool = True
    divided_by: str | None = None
    num_ranks: int = 1

    @property
    def effects(self) -> tuple[bool, bool, bool, str]:
        """What a backward makes of them: a divisor that was set to torch's own changes nothing."""
        return self.synchronizes, self.all_reduces, self.ends, self.divided_by or str(self.num_ranks)


def fsdp2_switches(state: Any) -> GradientSwitches:
    """``state``: an ``FSDPState``. ``FSDPParamGroup`` and ``FSDPStateContext`` keep what public methods set alone."""
    groups = fsdp2_groups(state)
    return GradientSwitches(
        synchronizes=all(get(group, "reduce_grads") for group in groups),
        all_reduces=all(get(group, "all_reduce_grads") for group in groups if _replicates(group)),
        ends=get(get(state, "_state_ctx"), "is_last_backward"),
        divided_by=next(filter(None, map(_divisor, groups)), None),
        num_ranks=max((get(group, "mesh_info").mesh.size() for group in groups), default=1),
    )


def fsdp1_switches(module: nn.Module) -> GradientSwitches:
    """``FullyShardedDataParallel._sync_gradients``, which ``no_sync()`` switches off until it ends."""
    return GradientSwitches(synchronizes=get(module, "_sync_gradients"))


def _replicates(group: Any) -> bool:
    """Under HSDP and ``replicate()``: elsewhere nothing reads whether it all-reduces."""
    return hasattr(get(group, "mesh_info"), "replicate_mesh_size")


def _divisor(group: Any) -> str | None:
    """torch 2.6 and 2.7 keep an operator of NCCL in place of the factor."""
    factor = getattr(group, "gradient_divide_factor", None)
    if factor is None:
        return "another factor" if getattr(group, "reduce_scatter_reduce_op", None) is not None else None
    return f"{factor:g}"
