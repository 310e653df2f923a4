"""A training step as allocations: forward, backward and the optimizer, around what FSDP gathers and reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp_doctor.ledgers.allocators import rounded_sum
from fsdp_doctor.plan.activations import Moment, Pass, Segment, SegmentPlace
from fsdp_doctor.plan.rank_shards import RankShards, UnitShard
from fsdp_doctor.plan.role_setup import RoleSetup
from fsdp_doctor.plan.timeline import Timeline


class UnitReplay(Protocol):
    """What an FSDP allocates around the computation of each of its units, in torch's order.

    In ``post_backward`` the gradients of the unsharded parameters, so many bytes, are on the timeline, and go.
    """

    def pre_forward(self, unit: UnitShard) -> None: ...

    def post_forward(self, unit: UnitShard) -> None: ...

    def end_forward(self) -> None: ...

    def pre_backward(self, unit: UnitShard, following: UnitShard | None) -> None: ...

    def post_backward(self, unit: UnitShard, gradients: int) -> None: ...

    def end_backward(self) -> None: ...


def replay_forward_and_backward(
    timeline: Timeline, units: UnitReplay, shards: RankShards, segments: Sequence[Segment], setup: RoleSetup
) -> None:
    compute = _Computation(timeline, segments)
    units.pre_forward(shards.root)
    if shards.embedding:
        units.pre_forward(shards.embedding)
    compute.run("forward", "before")
    if shards.embedding:
        units.post_forward(shards.embedding)
    for at, layer in enumerate(shards.layers):
        units.pre_forward(layer)
        compute.run("forward", at)
        units.post_forward(layer)
    compute.run("forward", "after")
    units.end_forward()
    if setup.trains:
        _backward(compute, units, shards, setup)
    compute.end()
    units.end_backward()


def _backward(compute: _Computation, units: UnitReplay, shards: RankShards, setup: RoleSetup) -> None:
    # In the order of the backward, after the root, which stays unsharded between the two.
    following = [*reversed(shards.layers), *((shards.embedding,) if shards.embedding else ()), None]
    units.pre_backward(shards.root, following[0])
    compute.run("backward", "after")
    for at, layer in reversed(list(enumerate(shards.layers))):
        units.pre_backward(layer, following[len(shards.layers) - at])
        compute.run("backward", at)
        gradients = _unsharded(layer, setup) if compute.follows(at) else 0
        units.post_backward(layer, compute.drop_gradients(gradients))
    if shards.embedding:
        units.pre_backward(shards.embedding, None)
    compute.run("backward", "before")
    # What tokens go into has no gradient of its input to wait for: it is reduced at the very end.
    units.post_backward(shards.root, compute.drop_gradients(_unsharded(shards.root, setup)))
    if shards.embedding:
        units.post_backward(shards.embedding, compute.drop_gradients(_unsharded(shards.embedding, setup)))


def _unsharded(unit: UnitShard, setup: RoleSetup) -> int:
    return rounded_sum(numel * setup.dtypes.compute for numel in unit.originals)


class _Computation:
    """Puts what was counted on the meta device onto the timeline: nothing of a layer that was not followed."""

    def __init__(self, timeline: Timeline, segments: Sequence[Segment]) -> None:
        self._timeline = timeline
        self._segments = {(segment.of, segment.place): segment for segment in segments}
        self._now = Moment()

    def follows(self, place: SegmentPlace) -> bool:
        return ("forward", place) in self._segments

    def run(self, of: Pass, place: SegmentPlace) -> None:
        if self.follows(place):
            segment = self._segments[of, place]
            self._go_to(segment.highest)
            self._go_to(segment.end)

    def drop_gradients(self, nbytes: int) -> int:
        """From here on they are the FSDP's to free."""
        nbytes = min(nbytes, self._now.gradients)
        self._now = Moment(self._now.activations, self._now.gradients - nbytes)
        return nbytes

    def end(self) -> None:
        self._go_to(Moment())

    def _go_to(self, moment: Moment) -> None:
        self._timeline.change(
            {
                "activations": moment.activations - self._now.activations,
                "gradients": moment.gradients - self._now.gradients,
            }
        )
        self._now = moment
