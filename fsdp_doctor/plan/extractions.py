"""What each path that takes weights out has on the device at once, beside what the model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fsdp_doctor.extract.full import BUCKET_BYTES
from fsdp_doctor.extract.loader import CAST_BYTES
from fsdp_doctor.extract.plan import SMALL_BYTES
from fsdp_doctor.ledgers.allocators import rounded, rounded_sum
from fsdp_doctor.plan.rank_shards import RankShards, UnitShard
from fsdp_doctor.plan.role_setup import RoleSetup
from fsdp_doctor.plan.timeline import Timeline


def replay_extraction(timeline: Timeline, shards: RankShards, setup: RoleSetup, path: str) -> None:
    """path: a name of the matrix; one that is not known here is taken for one that reads tensor after tensor."""
    for family, paths in FAMILIES.items():
        if path in paths:
            _REPLAYS[family](timeline, shards, setup)
            return
    _tensor_by_tensor(timeline, shards, setup)


def _buckets(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """full_tensors: as many buckets at once as fit into two, or into one and the largest tensor."""
    is_cast = setup.extracted_bytes not in (None, setup.dtypes.master)
    cast = CAST_BYTES if is_cast and setup.shards_on_host else 0
    most = BUCKET_BYTES + max(BUCKET_BYTES, _largest(shards, setup))
    buckets: list[tuple[int, int]] = [(0, 0)]
    # FSDP1's tensors are copied out of their unit as they are handed out, a few at a time.
    joined = max if setup.scenario.version == 1 and setup.shard_ranks > 1 else sum
    for gathered, buffered in _gathers(shards, setup, most):
        outputs, buffers = joined((buckets[-1][0], gathered)), buckets[-1][1] + buffered
        if sum(buckets[-1]) and outputs + buffers > BUCKET_BYTES:
            buckets.append((0, 0))
            outputs, buffers = gathered, buffered
        buckets[-1] = outputs, buffers
    for at in range(len(buckets)):
        outputs = buffers = 0
        for number, (gathered, buffered) in enumerate(buckets[at:]):
            if number and joined((outputs, gathered)) + buffers + buffered > most:
                break
            outputs, buffers = joined((outputs, gathered)), buffers + buffered
        with timeline.taken("communication buffers", buffers + cast), timeline.taken("gathered outputs", outputs):
            pass


def _gathers(shards: RankShards, setup: RoleSetup, most: int) -> list[tuple[int, int]]:
    """(bytes of outputs, bytes of buffers beside them) of each tensor or FSDP1 unit, in the order of the parameters."""
    itemsize = setup.extracted_bytes or setup.dtypes.master
    if setup.shard_ranks == 1:
        return [(rounded(numel * itemsize), 0) for unit in shards.units for numel in unit.originals]
    if setup.scenario.version == 1:
        return [gather for unit in shards.units for gather in _unit_gathers(unit, itemsize, most)]
    found = []
    for unit in shards.units:
        for numel in unit.full:
            nbytes = rounded(numel * itemsize)
            found.append((nbytes, nbytes if nbytes <= SMALL_BYTES else 0))
    return found


def _unit_gathers(unit: UnitShard, itemsize: int, most: int) -> list[tuple[int, int]]:
    """A unit of FSDP1 as a whole, where it fits; else in parts, each beside the tensors that it is put into."""
    sizes = [rounded(numel * itemsize) for numel in unit.originals]
    largest, flat = max(sizes), rounded(sum(unit.full) * itemsize)
    if 64 * (flat - largest) <= flat:
        return [(flat - largest, flat)]
    copied = min(sum(sizes), max(BUCKET_BYTES // 8, largest + largest // 8) + largest)
    return [(copied, flat)] if copied + flat <= most else [(0, 2 * nbytes) for nbytes in sizes]


def _tensor_by_tensor(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """A shard comes to the device, and is gathered; what is cut unevenly is padded first."""
    master = setup.dtypes.master
    if setup.shard_ranks == 1:
        brought = rounded(_largest(shards, setup)) if setup.shards_on_host else 0
        with timeline.taken("gathered outputs", brought):
            pass
        return
    for unit in shards.units:
        for numel, padded, own in zip(unit.full, unit.padded, unit.own, strict=False):
            brought = rounded(own * master) if setup.shards_on_host else 0
            copied = rounded(padded * master) if padded != own or setup.scenario.version == 1 else 0
            with timeline.taken("communication buffers", brought + copied):
                timeline.take("gathered outputs", rounded(numel * master))
            timeline.give("gathered outputs", rounded(numel * master))


def _whole(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Every tensor unsharded at the same time, in the dtype of the shards; FSDP1 copies them out of its units."""
    outputs = [rounded(numel * setup.dtypes.master) for unit in shards.units for numel in unit.originals]
    with timeline.taken("unsharded parameters", _largest_unit(shards, setup) if setup.scenario.version == 1 else 0):
        for nbytes in outputs:
            timeline.take("gathered outputs", nbytes)
        # What was brought or padded for the last one.
        if setup.shards_on_host and setup.scenario.version == 2:
            brought = max(numel for unit in shards.units for numel in unit.padded) * setup.dtypes.master
            with timeline.taken("communication buffers", rounded(brought)):
                pass
    timeline.give("gathered outputs", sum(outputs))


def _of_sharded_tensors(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """FSDP1 cuts every unit, unsharded, into tensors of its own, and each of them is gathered."""
    cut = rounded_sum(numel * setup.dtypes.master for unit in shards.units for numel in unit.padded)
    with (
        timeline.taken("unsharded parameters", _largest_unit(shards, setup)),
        timeline.taken("communication buffers", cut + rounded(_largest(shards, setup))),
    ):
        pass


def _unit_by_unit(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """One unit after the other, in the dtype that is computed in."""
    compute = setup.dtypes.compute
    for unit in shards.units:
        gathered = rounded(sum(unit.full) * compute) if setup.shard_ranks > 1 else 0
        with (
            timeline.taken("communication buffers", gathered),
            timeline.taken("unsharded parameters", rounded_sum(numel * compute for numel in unit.full)),
        ):
            pass


def _in_full_precision(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """FSDP1's summon_full_params: all units, in the dtype of the shards."""
    if setup.scenario.version == 1:
        nbytes = rounded_sum(numel * setup.dtypes.master for unit in shards.units for numel in unit.full)
        with timeline.taken("unsharded parameters", nbytes):
            pass


def _nothing(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Shards as they are, or names and shapes."""


def _largest_unit(shards: RankShards, setup: RoleSetup) -> int:
    return max(rounded_sum(numel * setup.dtypes.master for numel in unit.full) for unit in shards.units)


def _largest(shards: RankShards, setup: RoleSetup) -> int:
    return max(numel for unit in shards.units for numel in unit.originals) * (
        setup.extracted_bytes or setup.dtypes.master
    )


FAMILIES: Mapping[str, tuple[str, ...]] = {
    "buckets": ("full_tensors",),
    "tensor by tensor": (
        "state_dict.to.full_tensor",
        "state_dict.full_tensor.to",
        "state_dict.held",
        "parameters.full_tensor",
        "parameters.data.full_tensor",
        "from_local",
        "get_model_state_dict.full+cpu",
        "full_state_dict.rank0+cpu",
    ),
    "whole": ("get_model_state_dict.full", "full_state_dict"),
    "of sharded tensors": ("sharded_state_dict.full_tensor",),
    "unit by unit": ("unshard",),
    "in full precision": ("summon_full_params",),
    "nothing": (
        "state_dict",
        "get_model_state_dict.sharded",
        "get_model_state_dict.sharded+cpu",
        "sharded_state_dict",
        "local_state_dict",
        "dcp",
        "weights_info",
    ),
}
_REPLAYS: Mapping[str, Callable[[Timeline, RankShards, RoleSetup], None]] = {
    "buckets": _buckets,
    "tensor by tensor": _tensor_by_tensor,
    "whole": _whole,
    "of sharded tensors": _of_sharded_tensors,
    "unit by unit": _unit_by_unit,
    "in full precision": _in_full_precision,
    "nothing": _nothing,
}
