"""What would free how much on the device, and whether the engine would start then."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.ledgers.stage_ledger import DeviceLedger
from fsdp_doctor.rollout.rollout_request import Attempt, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """setting: what to change, as verl has it. frees: bytes of the device. suffices: whether the engine would start."""

    setting: str
    frees: int
    suffices: bool


def remedies(request: RolloutRequest, loaded: Attempt) -> list[Remedy]:
    """loaded: the start beside a worker that has loaded the model."""
    device = loaded.trainer.device
    assert device is not None
    start = loaded.start
    lacking = start.requested - start.free
    freed = {
        "do not build the FSDP model in a worker that only generates": device.reserved,
        "param_offload=true, and the cache emptied after the load": device.reserved,
        f"fsdp_size=-1, over {_more_ranks(request)} ranks": _sharded_away(request, device),
        "empty the cache after the load (verl PR 5384)": device.reserved - device.allocated,
    }
    found = [
        Remedy(setting=setting, frees=nbytes, suffices=nbytes >= lacking) for setting, nbytes in freed.items() if nbytes
    ]
    # Two digits, rounded down.
    lower = int(100 * start.free / start.total) / 100
    if start.refusal and lower > 0:
        setting = f"gpu_memory_utilization={lower:g}: the engine has so much less for its cache"
        found.append(Remedy(setting=setting, frees=0, suffices=int(start.total * lower) > start.weights))
    return found


def _more_ranks(request: RolloutRequest) -> int:
    return max(request.ranks, 8)


def _sharded_away(request: RolloutRequest, device: DeviceLedger) -> int:
    parameters = device.held.get("parameters", 0)
    return parameters - parameters // _more_ranks(request) if request.cut == "size1" else 0
