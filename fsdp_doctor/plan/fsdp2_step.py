"""What FSDP2 allocates around each unit: read in torch 2.13, torch/distributed/fsdp/_fully_shard.

In a forward the output of an all-gather outlives its copy until that of the next unit has been made (implicit
prefetch), in a backward the next unit is gathered while one is computed. The input of a reduce-scatter is kept until
the next one begins, and what replicas have added up until the backward is over.
"""

from __future__ import annotations

from fsdp_doctor.ledgers.allocators import rounded, rounded_sum
from fsdp_doctor.ledgers.stage_ledger import MemoryClass
from fsdp_doctor.plan.rank_shards import UnitShard
from fsdp_doctor.plan.role_setup import RoleSetup
from fsdp_doctor.plan.timeline import Timeline


class Fsdp2Replay:
    def __init__(self, timeline: Timeline, setup: RoleSetup) -> None:
        self._timeline = timeline
        self._setup = setup
        self._gathered: dict[str, int] = {}  # outputs of all-gathers that were not copied out yet
        self._outlived = 0  # that of the unit before
        self._unsharded: set[str] = set()
        self._reduce_input = 0
        self._added_up = 0  # of all units, what the all-reduces of the replicas read and write

    def pre_forward(self, unit: UnitShard) -> None:
        self._unshard(unit)
        self._copy_out(unit, outlives=True)

    def post_forward(self, unit: UnitShard) -> None:
        self._reshard(unit)

    def end_forward(self) -> None:
        """The root stays unsharded."""
        self._timeline.give("communication buffers", self._outlived)
        self._outlived = 0

    def pre_backward(self, unit: UnitShard, following: UnitShard | None) -> None:
        if unit.name not in self._unsharded:
            self._unshard(unit)
            self._copy_out(unit, outlives=False)
        if following is not None:
            self._unshard(following)

    def post_backward(self, unit: UnitShard, gradients: int) -> None:
        self._reshard(unit)
        timeline, dtypes = self._timeline, self._setup.dtypes
        timeline.give("communication buffers", self._reduce_input)
        self._reduce_input = rounded(sum(unit.full) * dtypes.reduce)
        timeline.take("communication buffers", self._reduce_input)
        # A loop of foreach_reduce, which one shard does without, has the last gradient in its variable to the end.
        outlives = rounded(sum(unit.originals[-1:]) * dtypes.compute) if self._setup.shard_ranks > 1 else 0
        outlives = min(outlives, gradients)
        timeline.give("gradients", gradients - outlives)
        self._reduce(unit)
        timeline.give("gradients", outlives)

    def _reduce(self, unit: UnitShard) -> None:
        """What was added up is the gradient, or is cast to it; a policy copies the gradient to the host."""
        timeline, dtypes, by_policy = self._timeline, self._setup.dtypes, self._setup.scenario.policy
        sums = rounded(sum(unit.padded) * dtypes.reduce)
        cast = rounded(sum(unit.padded) * dtypes.master) if dtypes.reduce != dtypes.master else 0
        gradient: MemoryClass = "communication buffers" if by_policy else "gradients"
        is_passing = by_policy or cast > 0
        timeline.take("communication buffers" if is_passing else gradient, sums)
        timeline.take(gradient, cast)
        if by_policy:
            timeline.give(gradient, cast)
        if is_passing and self._setup.replicas > 1:
            # So that no other unit's may lie there while replicas add them up.
            self._added_up += sums
        elif is_passing:
            timeline.give("communication buffers", sums)

    def end_backward(self) -> None:
        timeline = self._timeline
        gathered = sum(self._gathered.values())
        timeline.give("communication buffers", self._reduce_input + self._added_up + gathered)
        self._reduce_input = self._added_up = 0
        self._gathered.clear()
        timeline.give("unsharded parameters", timeline.held("unsharded parameters"))
        self._unsharded.clear()

    def _unshard(self, unit: UnitShard) -> None:
        if self._setup.shard_ranks == 1 or unit.name in self._gathered:
            return
        dtypes = self._setup.dtypes
        nbytes = rounded(sum(unit.full) * dtypes.compute)
        shards = self._bring_shards(unit)
        self._timeline.take("communication buffers", nbytes)
        self._timeline.give("communication buffers", shards)
        self._gathered[unit.name] = nbytes

    def _bring_shards(self, unit: UnitShard) -> int:
        """Onto the device, in the dtype that is gathered: the bytes of what is to be copied into the all-gather."""
        dtypes, timeline = self._setup.dtypes, self._timeline
        if not self._setup.scenario.policy:
            cast = rounded(sum(unit.padded) * dtypes.compute) if dtypes.compute != dtypes.master else 0
            timeline.take("communication buffers", cast)
            return cast
        for numel in unit.padded:
            arrived = rounded(numel * dtypes.master) if dtypes.compute != dtypes.master else 0
            with timeline.taken("communication buffers", arrived):
                timeline.take("communication buffers", rounded(numel * dtypes.compute))
        return rounded_sum(numel * dtypes.compute for numel in unit.padded)

    def _copy_out(self, unit: UnitShard, *, outlives: bool) -> None:
        timeline = self._timeline
        gathered = self._gathered.pop(unit.name, 0)
        if outlives:
            timeline.give("communication buffers", self._outlived)
            self._outlived = gathered
        for numel in unit.full:
            cast = numel * self._setup.dtypes.compute if self._setup.shard_ranks == 1 else 0
            with timeline.taken("communication buffers", rounded(cast)):
                timeline.take("unsharded parameters", rounded(numel * self._setup.dtypes.compute))
        self._unsharded.add(unit.name)
        if not outlives:
            timeline.give("communication buffers", gathered)

    def _reshard(self, unit: UnitShard) -> None:
        self._unsharded.discard(unit.name)
        self._timeline.give(
            "unsharded parameters", rounded_sum(numel * self._setup.dtypes.compute for numel in unit.full)
        )
