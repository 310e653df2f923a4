"""What would free how much on the device, and whether the engine would start then."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.ledgers.stage_ledger import DeviceLedger
from fsdp_doctor.rollout.rollout_request import Attempt, EngineStart, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """setting: what to change, as verl has it. frees: bytes of the device. suffices: whether the engine would start."""

    setting: str
    frees: int
    suffices: bool


def remedies(request: RolloutRequest, loaded: Attempt) -> list[Remedy]:
    """For an engine whose share is not free, or too small for its weights; empty where nothing here would help.

    loaded: the start beside a worker that has loaded the model.
    """
    start = loaded.start
    if start.requested < start.weights:
        return _larger_share(start)
    if start.free < start.requested:
        return [*_more_free(request, loaded), *_smaller_share(start)]
    return []


def _more_free(request: RolloutRequest, loaded: Attempt) -> list[Remedy]:
    device = loaded.trainer.device
    assert device is not None
    lacking = loaded.start.requested - loaded.start.free
    freed = {
        "do not build the FSDP model in a worker that only generates": device.reserved,
        "param_offload=true, and the cache emptied after the load": device.reserved,
        f"fsdp_size=-1, over {_more_ranks(request)} ranks": _sharded_away(request, device),
        "empty the cache after the load (verl PR 5384)": device.reserved - device.allocated,
    }
    return [
        Remedy(setting=setting, frees=nbytes, suffices=nbytes >= lacking) for setting, nbytes in freed.items() if nbytes
    ]


def _smaller_share(start: EngineStart) -> list[Remedy]:
    # Two digits, rounded down.
    lower = int(100 * start.free / start.total) / 100
    if lower == 0:
        return []
    setting = f"gpu_memory_utilization={lower:g}: the engine has so much less for its cache"
    return [Remedy(setting=setting, frees=0, suffices=int(start.total * lower) > start.weights)]


def _larger_share(start: EngineStart) -> list[Remedy]:
    """The least share of two digits in which the weights have room, and something is left for a cache."""
    for percent in range(1, 101):
        share = percent / 100
        if (asked := int(start.total * share)) > start.weights:
            setting = f"gpu_memory_utilization={share:g}: the share has room for the weights"
            return [Remedy(setting=setting, frees=0, suffices=asked <= start.free)]
    return []


def _more_ranks(request: RolloutRequest) -> int:
    return max(request.ranks, 8)


def _sharded_away(request: RolloutRequest, device: DeviceLedger) -> int:
    parameters = device.held.get("parameters", 0)
    return parameters - parameters // _more_ranks(request) if request.cut == "size1" else 0
