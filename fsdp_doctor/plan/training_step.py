"""Simulates the allocations of a training step: forward, backward, optimizer, and FSDP's gathers and reductions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_doctor.examination.memory_records import Bytes, DeviceMemory, MemoryClass, round_up, sum_rounded
from fsdp_doctor.matrix.axes import Strategy
from fsdp_doctor.plan.activations import LiveBytes, Pass, Segment, SegmentPlace
from fsdp_doctor.plan.job import RoleSetup
from fsdp_doctor.plan.meta_model import ModelShape, ShapedParameter, ShapedUnit


@dataclass(frozen=True, kw_only=True)
class UnitShard:
    """The numbers of elements in one FSDP unit on one rank.

    padded: the size of each shard with its padding, which is the same on every rank.
    local: the size of each tensor of this rank that the optimizer updates.
    full: the size of each tensor that a gather fills.
    originals: the size of each unsharded parameter.
    """

    name: str
    padded: tuple[int, ...]
    local: tuple[int, ...]
    full: tuple[int, ...]
    originals: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankShards:
    """The FSDP units of a model on one rank of a shard group."""

    root: UnitShard
    embedding: UnitShard | None
    layers: tuple[UnitShard, ...]

    @property
    def units(self) -> tuple[UnitShard, ...]:
        return (self.root, *((self.embedding,) if self.embedding else ()), *self.layers)


def shard_units(shape: ModelShape, strategy: Strategy, *, rank: int, ranks: int) -> RankShards:
    """Shards all units of a model. Under FSDP1 the embedding belongs to the root unit.

    rank: the rank within its shard group.
    ranks: the number of ranks in a shard group.
    """
    if strategy.version == 2:
        return RankShards(
            root=_shard_fsdp2_unit(shape.root, rank, ranks),
            embedding=_shard_fsdp2_unit(shape.embedding, rank, ranks) if shape.embedding else None,
            layers=tuple(_shard_fsdp2_unit(unit, rank, ranks) for unit in shape.layers),
        )
    of_embedding = shape.embedding.parameters if shape.embedding else ()
    whole = not strategy.uses_original_parameters
    return RankShards(
        root=_shard_fsdp1_unit(ShapedUnit("root", (*of_embedding, *shape.root.parameters)), rank, ranks, whole=whole),
        embedding=None,
        layers=tuple(_shard_fsdp1_unit(unit, rank, ranks, whole=whole) for unit in shape.layers),
    )


def _shard_fsdp2_unit(unit: ShapedUnit, rank: int, ranks: int) -> UnitShard:
    """Cuts each parameter along its first dimension into chunks of equal size; the last chunks are padded."""
    chunks = [_compute_chunk(parameter, rank, ranks) for parameter in unit.parameters]
    return UnitShard(
        name=unit.name,
        padded=tuple(padded for padded, _ in chunks),
        local=tuple(local for _, local in chunks),
        full=tuple(padded * ranks for padded, _ in chunks),
        originals=tuple(parameter.numel for parameter in unit.parameters),
    )


def _compute_chunk(parameter: ShapedParameter, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the number of elements in a padded chunk, and the number in this rank's chunk."""
    rows, *others = parameter.shape or (1,)
    chunk = -(-rows // ranks)
    return chunk * math.prod(others), max(0, min(chunk, rows - rank * chunk)) * math.prod(others)


def _shard_fsdp1_unit(unit: ShapedUnit, rank: int, ranks: int, *, whole: bool) -> UnitShard:
    """Cuts the flat parameter into chunks of equal size; the last chunk is padded.

    whole: whether the optimizer updates the flat parameter itself, and not the original parameters.
    """
    chunk = -(-unit.numel // ranks)
    begin, end = rank * chunk, min((rank + 1) * chunk, unit.numel)
    parts: list[int] = []
    at = 0
    for parameter in unit.parameters:
        parts.append(max(0, min(end, at + parameter.numel) - max(begin, at)))
        at += parameter.numel
    return UnitShard(
        name=unit.name,
        padded=(chunk,),
        local=(chunk,) if whole else tuple(parts),
        full=(chunk * ranks,),
        originals=tuple(parameter.numel for parameter in unit.parameters),
    )


class Timeline:
    """The simulated memory of one device during a stage, in bytes by class. Callers round sizes to multiples of 512."""

    def __init__(self) -> None:
        self._held: dict[MemoryClass, int] = {}
        self._at_peak: Bytes = {}
        self._peak = 0

    def change(self, by: Bytes) -> None:
        """Changes the bytes of several classes at the same moment."""
        for what, nbytes in by.items():
            self._held[what] = self._held.get(what, 0) + nbytes
            assert self._held[what] >= 0, what
        now = sum(self._held.values())
        if now > self._peak:
            self._peak, self._at_peak = now, {name: size for name, size in self._held.items() if size}

    def allocate(self, what: MemoryClass, nbytes: int) -> None:
        self.change({what: nbytes})

    def free(self, what: MemoryClass, nbytes: int | None = None) -> None:
        """Frees the given bytes of a class, or all bytes."""
        self.change({what: -(self.count_bytes(what) if nbytes is None else nbytes)})

    def count_bytes(self, what: MemoryClass) -> int:
        return self._held.get(what, 0)

    @contextlib.contextmanager
    def allocate_temporarily(self, what: MemoryClass, nbytes: int) -> Iterator[None]:
        """Allocates memory for the duration of a ``with`` block."""
        self.allocate(what, nbytes)
        yield
        self.free(what, nbytes)

    def pass_peak(self, by: Bytes) -> None:
        """Allocates memory of several classes at the same moment, and frees all of it immediately."""
        self.change(by)
        self.change({what: -nbytes for what, nbytes in by.items()})

    def end_stage(self) -> DeviceMemory:
        """Returns the ledger of the stage. The next stage begins with the memory that is still allocated."""
        by_class = {name: size for name, size in self._held.items() if size}
        allocated = sum(by_class.values())
        memory = DeviceMemory(
            held=by_class,
            at_peak=self._at_peak,
            allocated=allocated,
            peak=self._peak,
            reserved=allocated,
            peak_reserved=self._peak,
        )
        self._peak, self._at_peak = allocated, by_class
        return memory


def replay_forward_and_backward(
    timeline: Timeline, fsdp: FsdpReplay, shards: RankShards, segments: Sequence[Segment], setup: RoleSetup
) -> None:
    compute = _Computation(timeline, segments)
    fsdp.unshard(shards.root)
    if shards.embedding:
        fsdp.unshard(shards.embedding)
    compute.run("forward", "before")
    if shards.embedding:
        fsdp.reshard(shards.embedding)
    for at, layer in enumerate(shards.layers):
        fsdp.unshard(layer)
        compute.run("forward", at)
        fsdp.reshard(layer)
    compute.run("forward", "after")
    # The root stays unsharded.
    fsdp.end_forward()
    if setup.trains:
        _replay_backward(compute, fsdp, shards, setup)
    compute.end()
    fsdp.end_backward()


def _replay_backward(compute: _Computation, fsdp: FsdpReplay, shards: RankShards, setup: RoleSetup) -> None:
    # In the order of the backward, after the root, which stays unsharded between the two.
    following = [*reversed(shards.layers), *((shards.embedding,) if shards.embedding else ()), None]
    fsdp.prepare_backward(shards.root, following[0])
    compute.run("backward", "after")
    for at, layer in reversed(list(enumerate(shards.layers))):
        fsdp.prepare_backward(layer, following[len(shards.layers) - at])
        compute.run("backward", at)
        gradients = _count_unsharded_bytes(layer, setup) if compute.was_traced(at) else 0
        fsdp.post_backward(layer, compute.leave_gradients(gradients))
    if shards.embedding:
        fsdp.prepare_backward(shards.embedding, None)
    compute.run("backward", "before")
    # The root, which takes the tokens, has no gradient of its input to wait for: it is reduced at the very end.
    for unit in (shards.root, shards.embedding):
        if unit:
            fsdp.post_backward(unit, compute.leave_gradients(_count_unsharded_bytes(unit, setup)))


def _count_unsharded_bytes(unit: UnitShard, setup: RoleSetup) -> int:
    return sum_rounded(numel * setup.dtypes.compute for numel in unit.originals)


class _Computation:
    """Replays the activations and gradients that were traced on the meta device; an untraced layer has none."""

    def __init__(self, timeline: Timeline, segments: Sequence[Segment]) -> None:
        self._timeline = timeline
        self._segments = {(segment.of, segment.place): segment for segment in segments}
        self._now = LiveBytes()

    def was_traced(self, place: SegmentPlace) -> bool:
        return ("forward", place) in self._segments

    def run(self, of: Pass, place: SegmentPlace) -> None:
        if self.was_traced(place):
            segment = self._segments[of, place]
            self._go_to(segment.highest)
            self._go_to(segment.end)

    def leave_gradients(self, nbytes: int) -> int:
        """Hands traced gradients over to FSDP, which frees them later, and returns their number of bytes.

        The gradients stay on the timeline.

        nbytes: the largest number of bytes to hand over.
        """
        nbytes = min(nbytes, self._now.gradients)
        self._now = LiveBytes(self._now.activations, self._now.gradients - nbytes)
        return nbytes

    def end(self) -> None:
        self._go_to(LiveBytes())

    def _go_to(self, live: LiveBytes) -> None:
        before, self._now = self._now, live
        activations, gradients = live.activations - before.activations, live.gradients - before.gradients
        self._timeline.change({"activations": activations, "gradients": gradients})


class Fsdp1Replay:
    """Replays the allocations of FSDP1, as in _runtime_utils.py and _flat_param.py of torch 2.13.

    An all-gather fills the flat parameter itself. In the backward, the next unit is gathered before the present unit is
    computed. The gradients of a unit's parameters are joined into one flat gradient, which is cast for the
    reduce-scatter.

    views: bytes that only the modules' views keep alive, by unit name; freed when the unit is next unsharded.
    """

    def __init__(self, timeline: Timeline, setup: RoleSetup, views: dict[str, int]) -> None:
        self._timeline = timeline
        self._setup = setup
        self._views = views
        self._unsharded: set[str] = set()

    def unshard(self, unit: UnitShard) -> None:
        if unit.name in self._unsharded:
            return
        dtypes, timeline = self._setup.dtypes, self._timeline
        self._unsharded.add(unit.name)
        if self._setup.computes_with_shards and not self._setup.scenario.policy:
            timeline.free("unsharded parameters", self._views.pop(unit.name, 0))
            return
        cast = sum_rounded(numel * dtypes.compute for numel in unit.padded) if dtypes.compute != dtypes.master else 0
        if self._setup.scenario.policy:
            arrived = sum_rounded(numel * dtypes.master for numel in unit.padded)
            timeline.pass_peak({"communication buffers": arrived + cast})
        # Without shards, the cast shard is what is computed with.
        with timeline.allocate_temporarily("communication buffers", cast if self._setup.shard_ranks > 1 else 0):
            timeline.allocate("unsharded parameters", sum_rounded(numel * dtypes.compute for numel in unit.full))
        timeline.free("unsharded parameters", self._views.pop(unit.name, 0))

    def reshard(self, unit: UnitShard) -> None:
        self._unsharded.discard(unit.name)
        nbytes = sum_rounded(numel * self._setup.dtypes.compute for numel in unit.full)
        if self._setup.computes_with_shards and not self._setup.scenario.policy:
            return
        if self._setup.views_hold_shards:
            self._views[unit.name] = nbytes
        else:
            self._timeline.free("unsharded parameters", nbytes)

    def end_forward(self) -> None:
        """Does nothing, because FSDP1 frees no memory at the end of a forward."""

    def prepare_backward(self, unit: UnitShard, following: UnitShard | None) -> None:
        self.unshard(unit)
        if following is not None:
            self.unshard(following)

    def post_backward(self, unit: UnitShard, gradients: int) -> None:
        """Replays the reduction of a unit.

        gradients: bytes of the unit's unsharded gradients, which are freed.
        """
        timeline, dtypes = self._timeline, self._setup.dtypes
        numel, padded = sum(unit.originals), sum(unit.padded)
        joined = round_up(numel * dtypes.compute)
        timeline.allocate("gradients", joined)
        timeline.free("gradients", gradients)
        self.reshard(unit)
        if self._setup.shard_ranks == 1:
            # NO_SHARD: the cast gradient is added up among the replicas, and stays, or what is cast from it.
            self._allocate_gradient(numel)
            timeline.free("gradients", joined)
            return
        reduced = round_up(numel * dtypes.reduce) if dtypes.reduce != dtypes.compute else 0
        if numel != sum(unit.full):
            reduced += round_up(sum(unit.full) * dtypes.reduce)
        with timeline.allocate_temporarily("communication buffers", reduced):
            self._allocate_gradient(padded)
        timeline.free("gradients", joined)

    def _allocate_gradient(self, numel: int) -> None:
        """Allocates the result of a reduction, and replaces it by the cast gradient if the dtypes differ."""
        timeline, dtypes = self._timeline, self._setup.dtypes
        timeline.allocate("gradients", round_up(numel * dtypes.reduce))
        if dtypes.reduce != dtypes.master:
            timeline.allocate("gradients", round_up(numel * dtypes.master))
            timeline.free("gradients", round_up(numel * dtypes.reduce))

    def end_backward(self) -> None:
        if self._setup.scenario.policy:
            self._timeline.free("gradients")
        unsharded = self._timeline.count_bytes("unsharded parameters") - sum(self._views.values())
        self._timeline.free("unsharded parameters", unsharded)
        self._unsharded.clear()


class Fsdp2Replay:
    """Replays the allocations of FSDP2, as in torch/distributed/fsdp/_fully_shard of torch 2.13.

    In the forward, the output of an all-gather is kept until the next unit has been gathered (implicit prefetch). In
    the backward, the next unit is gathered while the present unit is computed. The input of a reduce-scatter is kept
    until the next reduce-scatter begins. The buffers of the replicas' all-reduces are kept until the backward ends.
    """

    def __init__(self, timeline: Timeline, setup: RoleSetup) -> None:
        self._timeline = timeline
        self._setup = setup
        self._gathered: dict[str, int] = {}  # outputs of all-gathers that were not copied out yet
        self._outlived = 0  # output of the previous unit's all-gather
        self._unsharded: set[str] = set()
        self._reduce_input = 0
        self._added_up = 0  # buffers of the replicas' all-reduces, of all units

    def unshard(self, unit: UnitShard) -> None:
        self._gather(unit)
        self._copy_out(unit, outlives=True)

    def reshard(self, unit: UnitShard) -> None:
        self._unsharded.discard(unit.name)
        self._timeline.free(
            "unsharded parameters", sum_rounded(numel * self._setup.dtypes.compute for numel in unit.full)
        )

    def end_forward(self) -> None:
        self._timeline.free("communication buffers", self._outlived)
        self._outlived = 0

    def prepare_backward(self, unit: UnitShard, following: UnitShard | None) -> None:
        if unit.name not in self._unsharded:
            self._gather(unit)
            self._copy_out(unit, outlives=False)
        if following is not None:
            self._gather(following)

    def post_backward(self, unit: UnitShard, gradients: int) -> None:
        """Replays the reduction of a unit.

        gradients: bytes of the unit's unsharded gradients, which are freed.
        """
        self.reshard(unit)
        timeline, dtypes = self._timeline, self._setup.dtypes
        timeline.free("communication buffers", self._reduce_input)
        self._reduce_input = round_up(sum(unit.full) * dtypes.reduce)
        timeline.allocate("communication buffers", self._reduce_input)
        # foreach_reduce keeps the last gradient in the variable of a loop until it returns; one shard has no such loop.
        outlives = round_up(sum(unit.originals[-1:]) * dtypes.compute) if self._setup.shard_ranks > 1 else 0
        outlives = min(outlives, gradients)
        timeline.free("gradients", gradients - outlives)
        self._reduce(unit)
        timeline.free("gradients", outlives)

    def _reduce(self, unit: UnitShard) -> None:
        """Replays a reduction, whose result is cast if the dtypes differ, and copied to the host by a policy."""
        timeline, dtypes, by_policy = self._timeline, self._setup.dtypes, self._setup.scenario.policy
        sums = round_up(sum(unit.padded) * dtypes.reduce)
        cast = round_up(sum(unit.padded) * dtypes.master) if dtypes.reduce != dtypes.master else 0
        gradient: MemoryClass = "communication buffers" if by_policy else "gradients"
        is_passing = by_policy or cast > 0
        timeline.allocate("communication buffers" if is_passing else gradient, sums)
        timeline.allocate(gradient, cast)
        if by_policy:
            timeline.free(gradient, cast)
        if is_passing and self._setup.replicas > 1:
            # So that no other unit's may lie there while replicas add them up.
            self._added_up += sums
        elif is_passing:
            timeline.free("communication buffers", sums)

    def end_backward(self) -> None:
        gathered = sum(self._gathered.values())
        self._timeline.free("communication buffers", self._reduce_input + self._added_up + gathered)
        self._reduce_input = self._added_up = 0
        self._gathered.clear()
        self._timeline.free("unsharded parameters")
        self._unsharded.clear()

    def _gather(self, unit: UnitShard) -> None:
        if self._setup.shard_ranks == 1 or unit.name in self._gathered:
            return
        nbytes = round_up(sum(unit.full) * self._setup.dtypes.compute)
        shards = self._bring_shards(unit)
        self._timeline.allocate("communication buffers", nbytes)
        self._timeline.free("communication buffers", shards)
        self._gathered[unit.name] = nbytes

    def _bring_shards(self, unit: UnitShard) -> int:
        """Allocates the copies of shards that a gather needs: cast, or brought from the host. Returns their bytes."""
        dtypes, timeline = self._setup.dtypes, self._timeline
        if not self._setup.scenario.policy:
            cast = round_up(sum(unit.padded) * dtypes.compute) if dtypes.compute != dtypes.master else 0
            timeline.allocate("communication buffers", cast)
            return cast
        for numel in unit.padded:
            arrived = round_up(numel * dtypes.master) if dtypes.compute != dtypes.master else 0
            with timeline.allocate_temporarily("communication buffers", arrived):
                timeline.allocate("communication buffers", round_up(numel * dtypes.compute))
        return sum_rounded(numel * dtypes.compute for numel in unit.padded)

    def _copy_out(self, unit: UnitShard, *, outlives: bool) -> None:
        timeline, compute = self._timeline, self._setup.dtypes.compute
        gathered = self._gathered.pop(unit.name, 0)
        if outlives:
            timeline.free("communication buffers", self._outlived)
            self._outlived = gathered
        for numel in unit.full:
            cast = numel * compute if self._setup.shard_ranks == 1 else 0
            with timeline.allocate_temporarily("communication buffers", round_up(cast)):
                timeline.allocate("unsharded parameters", round_up(numel * compute))
        self._unsharded.add(unit.name)
        if not outlives:
            timeline.free("communication buffers", gathered)


# Around the computation of each unit, in torch's order.
FsdpReplay: TypeAlias = Fsdp1Replay | Fsdp2Replay
