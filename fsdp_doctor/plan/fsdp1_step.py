"""What FSDP1 allocates around each unit: read in torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _flat_param.py.

An all-gather fills the flat parameter itself. In a backward the next unit is gathered before one is computed. The
gradients of a unit's parameters are joined to that of its flat parameter, which is cast for the reduce-scatter.
"""

from __future__ import annotations

from fsdp_doctor.ledgers.allocators import rounded, rounded_sum
from fsdp_doctor.plan.rank_shards import UnitShard
from fsdp_doctor.plan.role_setup import RoleSetup
from fsdp_doctor.plan.timeline import Timeline


class Fsdp1Replay:
    """views: bytes that only the modules' views of a unit hold, by its name; they go when it is next unsharded."""

    def __init__(self, timeline: Timeline, setup: RoleSetup, views: dict[str, int]) -> None:
        self._timeline = timeline
        self._setup = setup
        self._views = views
        self._unsharded: set[str] = set()

    def pre_forward(self, unit: UnitShard) -> None:
        self._unshard(unit)

    def post_forward(self, unit: UnitShard) -> None:
        self._reshard(unit)

    def end_forward(self) -> None:
        """The root stays unsharded."""

    def pre_backward(self, unit: UnitShard, following: UnitShard | None) -> None:
        self._unshard(unit)
        if following is not None:
            self._unshard(following)

    def post_backward(self, unit: UnitShard, gradients: int) -> None:
        timeline, dtypes = self._timeline, self._setup.dtypes
        numel = sum(unit.originals)
        joined = rounded(numel * dtypes.compute)
        timeline.take("gradients", joined)
        timeline.give("gradients", gradients)
        self._reshard(unit)
        if self._setup.shard_ranks == 1:
            # NO_SHARD: the cast gradient is added up among the replicas, and stays, or what is cast from it.
            timeline.take("gradients", rounded(numel * dtypes.reduce))
            if dtypes.reduce != dtypes.master:
                timeline.take("gradients", rounded(numel * dtypes.master))
                timeline.give("gradients", rounded(numel * dtypes.reduce))
            timeline.give("gradients", joined)
            return
        reduced = rounded(numel * dtypes.reduce) if dtypes.reduce != dtypes.compute else 0
        if numel != sum(unit.full):
            reduced += rounded(sum(unit.full) * dtypes.reduce)
        with timeline.taken("communication buffers", reduced):
            timeline.take("gradients", rounded(sum(unit.padded) * dtypes.reduce))
            if dtypes.reduce != dtypes.master:
                timeline.take("gradients", rounded(sum(unit.padded) * dtypes.master))
                timeline.give("gradients", rounded(sum(unit.padded) * dtypes.reduce))
        timeline.give("gradients", joined)

    def end_backward(self) -> None:
        if self._setup.scenario.policy:
            self._timeline.give("gradients", self._timeline.held("gradients"))
        unsharded = self._timeline.held("unsharded parameters") - sum(self._views.values())
        self._timeline.give("unsharded parameters", unsharded)
        self._unsharded.clear()

    def _unshard(self, unit: UnitShard) -> None:
        if unit.name in self._unsharded:
            return
        dtypes, timeline = self._setup.dtypes, self._timeline
        self._unsharded.add(unit.name)
        if self._setup.computes_with_shards and not self._setup.scenario.policy:
            timeline.give("unsharded parameters", self._views.pop(unit.name, 0))
            return
        cast = rounded_sum(numel * dtypes.compute for numel in unit.padded) if dtypes.compute != dtypes.master else 0
        if self._setup.scenario.policy:
            arrived = rounded_sum(numel * dtypes.master for numel in unit.padded)
            with timeline.taken("communication buffers", arrived + cast):
                pass
        # Unsharded, the cast shard is what is computed with.
        with timeline.taken("communication buffers", cast if self._setup.shard_ranks > 1 else 0):
            timeline.take("unsharded parameters", rounded_sum(numel * dtypes.compute for numel in unit.full))
        timeline.give("unsharded parameters", self._views.pop(unit.name, 0))

    def _reshard(self, unit: UnitShard) -> None:
        self._unsharded.discard(unit.name)
        nbytes = rounded_sum(numel * self._setup.dtypes.compute for numel in unit.full)
        if self._setup.computes_with_shards and not self._setup.scenario.policy:
            return
        if self._setup.views_hold_shards:
            self._views[unit.name] = nbytes
        else:
            self._timeline.give("unsharded parameters", nbytes)
