"""Simulates the stages of a job on one rank in order, and predicts the memory of the device and of the host."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.examination.memory_records import (
    HostMemory,
    JobStage,
    MemoryClass,
    StageMemory,
    round_to_power_of_two,
    round_up,
    sum_rounded,
)
from fsdp_doctor.plan.activations import Batch, LoopOverTokens, Segment, trace
from fsdp_doctor.plan.job import ModelHead, RoleSetup
from fsdp_doctor.plan.meta_model import ModelShape, build_on_meta, count_learned_positions, read_shape, silence_warnings
from fsdp_doctor.plan.training_step import (
    Fsdp1Replay,
    Fsdp2Replay,
    RankShards,
    Timeline,
    UnitShard,
    replay_forward_and_backward,
    shard_units,
)
from fsdp_doctor.text import read_first_line
from fsdp_doctor.weights.extract.full import BUCKET_BYTES
from fsdp_doctor.weights.transport.buckets import SMALL_BYTES, count_most_bytes
from fsdp_doctor.weights.transport.loader import CAST_BYTES


def _replay_buckets(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays ``full_tensors``: several buckets exist at once, together with the last tensor that the caller got."""
    itemsize = setup.extracted_bytes or setup.dtypes.master
    is_cast = setup.extracted_bytes not in (None, setup.dtypes.master)
    cast = CAST_BYTES if is_cast and setup.shards_on_host else 0
    # FSDP1's tensors are copied out of their unit as they are handed out, a few at a time.
    of_units = setup.scenario.version == 1 and setup.shard_ranks > 1
    # The root's own come last, after an embedding that is a unit.
    units = (*shards.units[1:], shards.root) if shards.embedding else shards.units
    sizes = [[numel * itemsize for numel in unit.originals] for unit in units]
    together = sizes if of_units else [[nbytes] for unit_sizes in sizes for nbytes in unit_sizes]
    most = count_most_bytes(together, BUCKET_BYTES)
    buckets: list[tuple[int, int]] = [(0, 0)]
    last = [0]
    joined = max if of_units else sum
    for gathered, buffered in _list_gathers(shards, setup, most):
        outputs, buffers = joined((buckets[-1][0], gathered)), buckets[-1][1] + buffered
        if sum(buckets[-1]) and outputs + buffers > BUCKET_BYTES:
            buckets.append((0, 0))
            last.append(0)
            outputs, buffers = gathered, buffered
        buckets[-1], last[-1] = (outputs, buffers), 0 if of_units else gathered
    for at in range(len(buckets)):
        outputs, buffers = last[at - 1] if at else 0, 0
        for number, (gathered, buffered) in enumerate(buckets[at:]):
            if number and joined((outputs, gathered)) + buffers + buffered > most:
                break
            outputs, buffers = joined((outputs, gathered)), buffers + buffered
        timeline.pass_peak({"communication buffers": buffers + cast, "gathered outputs": outputs})


def _list_gathers(shards: RankShards, setup: RoleSetup, most: int) -> list[tuple[int, int]]:
    """Lists (bytes of outputs, bytes of other buffers) for each tensor or FSDP1 unit, in parameter order."""
    itemsize = setup.extracted_bytes or setup.dtypes.master
    if setup.shard_ranks == 1:
        return [(round_up(numel * itemsize), 0) for unit in shards.units for numel in unit.originals]
    if setup.scenario.version == 1:
        return [gather for unit in shards.units for gather in _list_unit_gathers(unit, itemsize, most)]
    gathers = []
    for unit in shards.units:
        for numel in unit.full:
            nbytes = round_up(numel * itemsize)
            gathers.append((nbytes, nbytes if nbytes <= SMALL_BYTES else 0))
    return gathers


def _list_unit_gathers(unit: UnitShard, itemsize: int, most: int) -> list[tuple[int, int]]:
    """Lists the gathers of an FSDP1 unit as (bytes of outputs, bytes of other buffers).

    The unit is gathered as a whole if it fits into ``most`` bytes, otherwise in parts.
    """
    sizes = [round_up(numel * itemsize) for numel in unit.originals]
    largest, flat = max(sizes), round_up(sum(unit.full) * itemsize)
    if 64 * (flat - largest) <= flat:
        return [(flat - largest, flat)]
    copied = min(sum(sizes), max(BUCKET_BYTES // 8, largest + largest // 8) + largest)
    return [(copied, flat)] if copied + flat <= most else [(0, largest + min(BUCKET_BYTES, most - 2 * largest))]


def _replay_tensor_by_tensor(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays methods that copy one shard at a time to the device and gather it; an uneven shard is padded first."""
    master = setup.dtypes.master
    if setup.shard_ranks == 1:
        brought = round_up(_find_largest(shards, setup)) if setup.shards_on_host else 0
        timeline.pass_peak({"gathered outputs": brought})
        return
    for unit in shards.units:
        for numel, padded, local in zip(unit.full, unit.padded, unit.local, strict=False):
            brought = round_up(local * master) if setup.shards_on_host else 0
            copied = round_up(padded * master) if padded != local or setup.scenario.version == 1 else 0
            with timeline.allocate_temporarily("communication buffers", brought + copied):
                timeline.allocate("gathered outputs", round_up(numel * master))
            timeline.free("gathered outputs", round_up(numel * master))


def _replay_whole(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays methods that return all tensors in the dtype of the shards; FSDP1 copies them out of unsharded units."""
    outputs = [round_up(numel * setup.dtypes.master) for unit in shards.units for numel in unit.originals]
    with timeline.allocate_temporarily(
        "unsharded parameters", _find_largest_unit(shards, setup) if setup.scenario.version == 1 else 0
    ):
        for nbytes in outputs:
            timeline.allocate("gathered outputs", nbytes)
        # The shard that was brought or padded for the last tensor.
        if setup.shards_on_host and setup.scenario.version == 2:
            brought = max(numel for unit in shards.units for numel in unit.padded) * setup.dtypes.master
            timeline.pass_peak({"communication buffers": round_up(brought)})
    timeline.free("gathered outputs", sum(outputs))


def _replay_sharded_tensors(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays FSDP1's sharded state dict: each unsharded unit is cut into new shards, and each shard is gathered."""
    cut = sum_rounded(numel * setup.dtypes.master for unit in shards.units for numel in unit.padded)
    timeline.pass_peak(
        {
            "unsharded parameters": _find_largest_unit(shards, setup),
            "communication buffers": cut + round_up(_find_largest(shards, setup)),
        }
    )


def _replay_unit_by_unit(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays methods that unshard one unit after the other, in the dtype of the computation."""
    compute = setup.dtypes.compute
    for unit in shards.units:
        gathered = round_up(sum(unit.full) * compute) if setup.shard_ranks > 1 else 0
        timeline.pass_peak(
            {
                "communication buffers": gathered,
                "unsharded parameters": sum_rounded(numel * compute for numel in unit.full),
            }
        )


def _replay_full_precision(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays FSDP1's ``summon_full_params``, which unshards all units at once in the dtype of the shards."""
    if setup.scenario.version == 1:
        nbytes = sum_rounded(numel * setup.dtypes.master for unit in shards.units for numel in unit.full)
        timeline.pass_peak({"unsharded parameters": nbytes})


def _replay_nothing(timeline: Timeline, shards: RankShards, setup: RoleSetup) -> None:
    """Replays methods that allocate nothing, because they return the shards themselves, or only names and shapes."""


def _find_largest_unit(shards: RankShards, setup: RoleSetup) -> int:
    return max(sum_rounded(numel * setup.dtypes.master for numel in unit.full) for unit in shards.units)


def _find_largest(shards: RankShards, setup: RoleSetup) -> int:
    return max(numel for unit in shards.units for numel in unit.originals) * (
        setup.extracted_bytes or setup.dtypes.master
    )


# By the name of a method: how it allocates. Any other gathers tensor by tensor.
_REPLAYS: Mapping[str, Callable[[Timeline, RankShards, RoleSetup], None]] = {
    "full_tensors": _replay_buckets,
    **dict.fromkeys(("get_model_state_dict.full", "full_state_dict"), _replay_whole),
    "sharded_state_dict.full_tensor": _replay_sharded_tensors,
    "unshard": _replay_unit_by_unit,
    "summon_full_params": _replay_full_precision,
    **dict.fromkeys(
        (
            *("state_dict", "get_model_state_dict.sharded", "get_model_state_dict.sharded+cpu", "sharded_state_dict"),
            *("local_state_dict", "dcp", "dcp.async_save", "weights_info"),
            *("dcp.async_save.pinned", "dcp.async_save.not_awaited", "save_full_tensors"),
        ),
        _replay_nothing,
    ),
}
# Methods that read shards without unsharding a unit of FSDP1.
_READS_SHARDS = ("full_tensors", "save_full_tensors", "weights_info")


class RankReplay:
    """Simulates the stages of a job on one rank.

    segments: the traced segments of the forward, and of the backward if the model is trained.
    """

    def __init__(
        self, setup: RoleSetup, shards: RankShards, buffers: Sequence[int], segments: Sequence[Segment], rank: int = 0
    ) -> None:
        self._setup = setup
        self._shards = shards
        self._buffers = sum_rounded(buffers)
        self._segments = segments
        self._rank = rank
        self._timeline = Timeline()
        self._views: dict[str, int] = {}
        self._has_run = self._has_moments = False
        # What the allocator of pinned memory has taken: blocks of each size.
        self._pinned_blocks = collections.Counter[int]()
        self._ledgers: list[StageMemory] = []

    def replay_stages(self) -> list[StageMemory]:
        """Replays all stages, and returns their ledgers; a model that is not trained ends with its first offload."""
        scenario = self._setup.scenario
        self._build()
        self._end_stage("built")
        self._step()
        self._end_stage("first step")
        self._step()
        self._end_stage("trained")
        self._offload()
        self._end_stage("offloaded")
        if not self._setup.trains:
            return self._ledgers
        if scenario.staging.is_staged:
            self._stage()
            self._end_stage("staged")
        if self._setup.method:
            # Torch's own ways to unshard a unit of FSDP1 free the gradients that were kept.
            if self._setup.method not in _READS_SHARDS:
                self._timeline.free("gradients")
            replay = _REPLAYS.get(self._setup.method, _replay_tensor_by_tensor)
            replay(self._timeline, self._shards, self._setup)
            self._end_stage("extracted", self._setup.method)
        self._offload()
        self._end_stage("offloaded again", self._setup.method)
        self._load()
        self._end_stage("loaded", self._setup.method)
        self._step()
        self._end_stage("trained again", self._setup.method)
        return self._ledgers

    def _build(self) -> None:
        """Replays the sharding of the units, the root last; each unit is whole on the device until it is sharded."""
        scenario, master, timeline = self._setup.scenario, self._setup.dtypes.master, self._timeline
        # FSDP1 without shards keeps the flat parameter itself.
        is_kept = scenario.version == 1 and self._setup.shard_ranks == 1
        for unit in (*self._shards.units[1:], self._shards.root):
            whole = sum_rounded(numel * master for numel in unit.originals)
            if scenario.version == 1 and not is_kept:
                whole += round_up(sum(unit.originals) * master)
            timeline.pass_peak({"unsharded parameters": whole, "parameters": self._count_parameter_bytes(unit)})
            if not scenario.policy:
                timeline.allocate("parameters", self._count_parameter_bytes(unit))
            elif is_kept and not scenario.strategy.uses_original_parameters:
                # The policy takes it to the host, but the modules' views hold it until the unit first runs.
                self._views[unit.name] = self._count_parameter_bytes(unit)
                timeline.allocate("unsharded parameters", self._views[unit.name])
        timeline.allocate("buffers", self._buffers)

    def _step(self) -> None:
        timeline, setup = self._timeline, self._setup
        self._timeline.free("gradients")
        is_fsdp2 = setup.scenario.version == 2
        fsdp = Fsdp2Replay(timeline, setup) if is_fsdp2 else Fsdp1Replay(timeline, setup, self._views)
        replay_forward_and_backward(timeline, fsdp, self._shards, self._segments, setup)
        self._has_run = True
        if not setup.trains:
            return
        if not setup.scenario.policy:
            moment = sum(self._count_moment_bytes(unit) for unit in self._shards.units)
            if not self._has_moments:
                timeline.allocate("optimizer state", setup.moments * moment)
            # AdamW over lists of tensors: the square roots of all second moments at once.
            timeline.pass_peak({"optimizer state": moment})
        self._has_moments = True
        # With the original parameters zero_grad does not see FSDP1's flat gradients, which stay to the next forward.
        if not setup.scenario.strategy.uses_original_parameters:
            self._timeline.free("gradients")

    def _offload(self) -> None:
        if self._setup.scenario.param_offload:
            self._timeline.free("parameters")
            # The original parameters move along, and the last forward's views of them do not.
            has_views = self._setup.views_hold_shards or (self._setup.computes_with_shards and self._has_run)
            for unit in self._shards.units if has_views else ():
                if unit.name not in self._views:
                    self._views[unit.name] = self._count_parameter_bytes(unit)
                    self._timeline.allocate("unsharded parameters", self._views[unit.name])
            if self._setup.scenario.version == 2:
                self._timeline.free("buffers")
        if self._setup.scenario.optimizer_offload:
            self._timeline.free("optimizer state")
        if self._setup.scenario.policy:
            self._timeline.free("parameters")

    def _stage(self) -> None:
        """Replays ``model.to(device)``; shards under an offload policy may stay on the host."""
        shards = [round_up(numel * self._setup.dtypes.master) for unit in self._shards.units for numel in unit.padded]
        if not self._setup.stays_on_host:
            self._bring("parameters", sum(shards))
            self._bring("buffers", self._buffers)
        elif self._setup.scenario.version == 2:
            self._timeline.pass_peak({"parameters": max(shards)})

    def _load(self) -> None:
        if not self._setup.scenario.policy:
            self._bring("parameters", sum(map(self._count_parameter_bytes, self._shards.units)))
            if self._has_moments:
                self._bring(
                    "optimizer state", self._setup.moments * sum(map(self._count_moment_bytes, self._shards.units))
                )
        self._bring("buffers", self._buffers)

    def _bring(self, what: MemoryClass, nbytes: int) -> None:
        self._timeline.allocate(what, nbytes - self._timeline.count_bytes(what))

    def _count_parameter_bytes(self, unit: UnitShard) -> int:
        return sum_rounded(numel * self._setup.dtypes.master for numel in unit.padded)

    def _count_moment_bytes(self, unit: UnitShard) -> int:
        return sum_rounded(numel * self._setup.dtypes.master for numel in unit.local)

    def _end_stage(self, stage: JobStage, method: str = "") -> None:
        device = self._timeline.end_stage()
        host = self._count_host_memory()
        self._ledgers.append(
            StageMemory(job=self._setup.role, stage=stage, method=method, rank=self._rank, device=device, host=host)
        )

    def _count_host_memory(self) -> HostMemory:
        """Counts the tensors that are not on the device; offload policies and non-blocking copies use pinned memory."""
        setup, scenario = self._setup, self._setup.scenario
        master = setup.dtypes.master
        by_class: dict[MemoryClass, int] = {}
        pinned = pageable = 0
        sizes: list[tuple[MemoryClass, list[int], bool]] = []
        if not self._timeline.count_bytes("parameters"):
            # FSDP1 pins them when it first runs.
            by_policy = scenario.pinning.is_pinned and (scenario.version == 2 or self._has_run)
            is_pinned = by_policy if scenario.policy else not scenario.transfer.is_blocking
            padded = [numel * master for unit in self._shards.units for numel in unit.padded]
            sizes.append(("parameters", padded, is_pinned))
            if scenario.policy and scenario.version == 1 and self._has_moments:
                sizes.append(("gradients", padded, True))
        if self._has_moments and not self._timeline.count_bytes("optimizer state"):
            moments = [numel * master for unit in self._shards.units for numel in unit.local] * setup.moments
            sizes.append(("optimizer state", moments, not scenario.policy and not scenario.transfer.is_blocking))
        live = collections.Counter[int]()
        for name, each, is_pinned in sizes:
            by_class[name] = sum(each)
            if is_pinned:
                pinned += sum(each)
                live.update(map(round_to_power_of_two, each))
            else:
                pageable += sum(each)
        if scenario.policy and scenario.version == 2 and scenario.pinning.is_pinned and self._has_moments:
            # FSDP2 copies each gradient, without padding, to separate pinned memory, which zero_grad frees
            # (_fsdp_collectives.foreach_reduce, read in torch 2.6 to 2.13).
            live.update(round_to_power_of_two(numel * master) for unit in self._shards.units for numel in unit.local)
        # The allocator of pinned memory keeps what was freed for the next tensor of that size.
        self._pinned_blocks |= live
        reserved = sum(size * count for size, count in self._pinned_blocks.items())
        return HostMemory(held=by_class, pinned=pinned, pinned_reserved=reserved, pageable=pageable)


# Raised by a forward that reads values of tensors, which have none, or inputs that it is not given.
_NOT_FOLLOWED = (RuntimeError, TypeError, AttributeError, LookupError, ValueError, AssertionError)


class Predictor:
    """Predicts the memory ledgers of one model, which is traced only once for each batch.

    Raises UsageError for a model that does not exist, or that transformers cannot build.
    """

    def __init__(self, model: str, layers: int | None = None, head: ModelHead = "language") -> None:
        self._make = functools.partial(build_on_meta, model, layers, head)
        made = self._make()
        self.shape: ModelShape = read_shape(made, model)
        self._positions = count_learned_positions(made)
        self._traced: dict[Batch, tuple[Segment, ...]] = {}

    def predict_stages(self, setup: RoleSetup, rank: int = 0) -> list[StageMemory]:
        """Predicts the ledgers of all stages on one rank of a shard group; the first rank needs the most memory.

        Raises UsageError if no parameter has as many rows as the shard group has ranks, or if the sequences are longer
        than the learned positions. Raises CannotRun if the forward cannot be traced without weights.
        """
        if self._positions is not None and setup.length > self._positions:
            raise UsageError(
                f"{setup.role}: sequences of {setup.length} tokens are longer than the {self._positions} positions "
                f"of {self.shape.name}: give --seq-len"
            )
        longest = max(parameter.shape[0] for parameter in self.shape.parameters)
        if setup.shard_ranks > longest:
            raise UsageError(
                f"{setup.role}: {setup.shard_ranks} ranks share the model, but no parameter has more than {longest} "
                "rows: the last ranks would have none"
            )
        shards = shard_units(self.shape, setup.scenario.strategy, rank=rank, ranks=setup.shard_ranks)
        return RankReplay(setup, shards, self.shape.buffer_bytes, self._trace_segments(setup), rank).replay_stages()

    def _trace_segments(self, setup: RoleSetup) -> Sequence[Segment]:
        batch = Batch(
            sequences=setup.sequences, length=setup.length, checkpointing=setup.checkpointing, backward=setup.trains
        )
        if batch not in self._traced:
            try:
                with silence_warnings():
                    self._traced[batch] = trace(self._make(), batch)
            except LoopOverTokens:
                raise CannotRun(
                    f"{setup.role}: the forward of {self.shape.name} cannot be traced at {setup.length} tokens: it "
                    "loops over the tokens in Python, which would take minutes; a plan with a smaller --seq-len "
                    "is not comparable"
                ) from None
            except _NOT_FOLLOWED as error:
                why = read_first_line(error)
                raise CannotRun(
                    f"{setup.role}: the forward of {self.shape.name} fails in bfloat16, or cannot be traced "
                    f"without weights: {why}"
                ) from None
        return self._traced[batch]
