"""The stages of a job's life on one rank, replayed: what each holds on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.ledgers.allocators import power_of_two, rounded, rounded_sum
from fsdp_doctor.ledgers.stage_ledger import HostLedger, JobStage, MemoryClass, StageLedger
from fsdp_doctor.plan.activations import Segment
from fsdp_doctor.plan.extractions import replay_extraction
from fsdp_doctor.plan.fsdp1_step import Fsdp1Replay
from fsdp_doctor.plan.fsdp2_step import Fsdp2Replay
from fsdp_doctor.plan.rank_shards import RankShards, UnitShard
from fsdp_doctor.plan.role_setup import RoleSetup
from fsdp_doctor.plan.timeline import Timeline
from fsdp_doctor.plan.training_step import UnitReplay, replay_forward_and_backward

# Paths of our own, which take shards as they are.
_READS_SHARDS = ("full_tensors", "weights_info")


class Life:
    """One rank of a job. segments: of its forward, and of its backward where it trains."""

    def __init__(
        self, setup: RoleSetup, shards: RankShards, buffers: Sequence[int], segments: Sequence[Segment], rank: int = 0
    ) -> None:
        self._setup = setup
        self._shards = shards
        self._buffers = rounded_sum(buffers)
        self._segments = segments
        self._rank = rank
        self._timeline = Timeline()
        self._views: dict[str, int] = {}
        self._has_run = self._has_moments = False
        self._ledgers: list[StageLedger] = []

    def stages(self) -> list[StageLedger]:
        """From the model's making to the step after an extraction, or to the offload of one that only runs forward."""
        scenario = self._setup.scenario
        self._build()
        self._end("built")
        self._step()
        self._end("first step")
        self._step()
        self._end("trained")
        self._offload()
        self._end("offloaded")
        if not self._setup.trains:
            return self._ledgers
        if scenario.staging == "staged":
            self._stage()
            self._end("staged")
        if self._setup.path:
            self._extract()
            self._end("extracted", self._setup.path)
        self._offload()
        self._end("offloaded again", self._setup.path)
        self._load()
        self._end("loaded", self._setup.path)
        self._step()
        self._end("trained again", self._setup.path)
        return self._ledgers

    def _build(self) -> None:
        """Unit by unit, unsharded on the device until its shards are there, the root last."""
        scenario, master, timeline = self._setup.scenario, self._setup.dtypes.master, self._timeline
        # FSDP1 without shards keeps the flat parameter itself.
        is_kept = scenario.version == 1 and self._setup.shard_ranks == 1
        for unit in (*self._shards.units[1:], self._shards.root):
            whole = rounded_sum(numel * master for numel in unit.originals)
            if scenario.version == 1 and not is_kept:
                whole += rounded(sum(unit.originals) * master)
            with timeline.taken("unsharded parameters", whole), timeline.taken("parameters", self._parameters(unit)):
                pass
            if not scenario.policy:
                timeline.take("parameters", self._parameters(unit))
            elif is_kept and scenario.strategy == "fsdp1":
                # The policy takes it to the host, but the modules' views hold it until the unit first runs.
                self._views[unit.name] = self._parameters(unit)
                timeline.take("unsharded parameters", self._views[unit.name])
        timeline.take("buffers", self._buffers)

    def _step(self) -> None:
        timeline, setup = self._timeline, self._setup
        self._clear("gradients")
        replay_forward_and_backward(timeline, self._replay(), self._shards, self._segments, setup)
        self._has_run = True
        if not setup.trains:
            return
        if not setup.scenario.policy:
            one = sum(self._moment(unit) for unit in self._shards.units)
            if not self._has_moments:
                timeline.take("optimizer state", setup.moments * one)
            # AdamW over lists of tensors: the square roots of all second moments at once.
            with timeline.taken("optimizer state", one):
                pass
        self._has_moments = True
        # With the original parameters zero_grad does not see FSDP1's flat gradients, which stay to the next forward.
        if setup.scenario.strategy != "fsdp1-orig":
            self._clear("gradients")

    def _replay(self) -> UnitReplay:
        if self._setup.scenario.version == 2:
            return Fsdp2Replay(self._timeline, self._setup)
        return Fsdp1Replay(self._timeline, self._setup, self._views)

    def _offload(self) -> None:
        if self._setup.scenario.param_offload:
            self._clear("parameters")
            if self._setup.views_hold_shards:
                self._keep_views()
            if self._setup.scenario.version == 2:
                self._clear("buffers")
        if self._setup.scenario.optimizer_offload:
            self._clear("optimizer state")
        if self._setup.scenario.policy:
            self._clear("parameters")

    def _keep_views(self) -> None:
        for unit in self._shards.units:
            if unit.name not in self._views:
                self._views[unit.name] = self._parameters(unit)
                self._timeline.take("unsharded parameters", self._views[unit.name])

    def _stage(self) -> None:
        """model.to(device); FSDP1's units under a policy stay where they are."""
        shards = [rounded(numel * self._setup.dtypes.master) for unit in self._shards.units for numel in unit.padded]
        if not self._setup.stays_on_host:
            self._bring("parameters", sum(shards))
            self._bring("buffers", self._buffers)
        elif self._setup.scenario.version == 2:
            with self._timeline.taken("parameters", max(shards)):
                pass

    def _extract(self) -> None:
        # What unshards FSDP1's units by torch's own means lets go of the gradients that were kept.
        if self._setup.path not in _READS_SHARDS:
            self._clear("gradients")
        replay_extraction(self._timeline, self._shards, self._setup, self._setup.path)

    def _load(self) -> None:
        if not self._setup.scenario.policy:
            self._bring("parameters", sum(map(self._parameters, self._shards.units)))
            if self._has_moments:
                self._bring("optimizer state", self._setup.moments * sum(map(self._moment, self._shards.units)))
        self._bring("buffers", self._buffers)

    def _clear(self, what: MemoryClass) -> None:
        self._timeline.give(what, self._timeline.held(what))

    def _bring(self, what: MemoryClass, nbytes: int) -> None:
        self._timeline.take(what, nbytes - self._timeline.held(what))

    def _parameters(self, unit: UnitShard) -> int:
        return rounded_sum(numel * self._setup.dtypes.master for numel in unit.padded)

    def _moment(self, unit: UnitShard) -> int:
        return rounded_sum(numel * self._setup.dtypes.master for numel in unit.own)

    def _end(self, stage: JobStage, path: str = "") -> None:
        device = self._timeline.end_stage()
        ledger = StageLedger(
            job=self._setup.role, stage=stage, path=path, rank=self._rank, device=device, host=self._host()
        )
        self._ledgers.append(ledger)

    def _host(self) -> HostLedger:
        """What is not on the device, is here; pinned under a policy, or where a copy does not wait."""
        setup, scenario = self._setup, self._setup.scenario
        master = setup.dtypes.master
        held: dict[MemoryClass, int] = {}
        pinned = reserved = pageable = 0
        sizes: list[tuple[MemoryClass, list[int], bool]] = []
        if not self._timeline.held("parameters"):
            # FSDP1 pins them when it first runs.
            by_policy = scenario.pinning == "pinned" and (scenario.version == 2 or self._has_run)
            is_pinned = by_policy if scenario.policy else scenario.transfer == "nonblocking"
            padded = [numel * master for unit in self._shards.units for numel in unit.padded]
            sizes.append(("parameters", padded, is_pinned))
            if scenario.policy and scenario.version == 1 and self._has_moments:
                sizes.append(("gradients", padded, True))
        if self._has_moments and not self._timeline.held("optimizer state"):
            own = [numel * master for unit in self._shards.units for numel in unit.own] * setup.moments
            sizes.append(("optimizer state", own, not scenario.policy and scenario.transfer == "nonblocking"))
        for name, each, is_pinned in sizes:
            held[name] = sum(each)
            if is_pinned:
                pinned += sum(each)
                reserved += sum(map(power_of_two, each))
            else:
                pageable += sum(each)
        return HostLedger(held=held, pinned=pinned, pinned_reserved=reserved, pageable=pageable)
