"""verl: PPO and its relatives (actor, ref, critic), and the SFT trainer.

Read in verl's sources at v0.7.1, v0.8.0, v0.9.0 and main of August 2026: trainer/config/*.yaml for what absent keys
mean, workers/fsdp_workers.py (removed by PR 6067) and workers/engine/fsdp/transformer_impl.py for what is moved and
read, utils/fsdp_utils.py for how, utils/checkpoint/fsdp_checkpoint_manager.py for checkpoints, trainer/ppo/utils.py
for which models are built.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from fsdp_doctor.check import common
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import (
    ConfigFinding,
    ExtractionPoint,
    Given,
    Reading,
    Reason,
    Use,
    because,
    conflict,
    merged,
    note,
)
from fsdp_doctor.matrix.cases import Case, Scenario, scenario_of

NAME = "verl"
KNOWN_BY = "actor_rollout_ref.*, critic.*, or engine.* of its SFT trainer"

_SFT_KEYS = ("strategy", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size", "use_orig_params")
_KEYS = (
    *_SFT_KEYS,
    *("_target_", "wrap_policy", "reshard_after_forward", "forward_prefetch", "model_dtype", "mixed_precision"),
    *("seed", "full_determinism", "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking"),
    *("entropy_from_logits_chunk_size", "use_torch_compile", "entropy_checkpointing", "pad_to_length"),
    *("pad_to_length_bucket", "forward_only", "dtype", "qat", "turbo_config", "infer_max_token_len_per_gpu"),
    *("infer_micro_batch_size_per_gpu", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_dynamic_bsz"),
    *("use_remove_padding", "use_fused_kernels", "enable_activation_offload"),
)
_OFFLOADS = ("offload_policy", "param_offload", "optimizer_offload")
_ROOTS = ("actor_rollout_ref", "critic", "engine")
_OTHER_ENGINES = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")
_FSDP = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


@dataclass(frozen=True, kw_only=True)
class Era:
    """A range of versions that offload, stage and read alike.

    stages: the engine stages before each sync, whatever the offload. stages_policy: under CPUOffloadPolicy too.
    stages_fsdp2: an FSDP2 model without adapters too. saves_policy_staged: a checkpoint under the policy is taken
    from a module that was moved. holds: the state dict is read after the module was offloaded again.
    merged_late: a merged adapter is read after the merge was undone. nonblocking: FSDP2 shards are copied so.
    asks_offloaded: fully asynchronous training asks an offloaded model for its names and shapes (issue 4657).
    critic_backend: of the critic's own process group.
    """

    versions: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    stages: bool = True
    stages_policy: bool = False
    stages_fsdp2: bool = True
    saves_policy_staged: bool = False
    holds: bool = True
    merged_late: bool = True
    nonblocking: bool = False
    asks_offloaded: bool = False
    critic_backend: str = "mixed"


_LEGACY = "before v0.8.0, trainer.use_legacy_worker_impl=auto or enable"
_ENGINE = "before v0.8.0, trainer.use_legacy_worker_impl=disable or a checkout after v0.7.1"
_NEWER = (1 << 30,)
_ERAS: tuple[Era, ...] = (
    Era(versions=_LEGACY, first=(0,), end=(0, 8), stages=False, asks_offloaded=True, critic_backend="device-only"),
    Era(versions=_ENGINE, first=(0,), end=(0, 8), stages_policy=True, saves_policy_staged=True),
    Era(versions="v0.8", first=(0, 8), end=(0, 9), saves_policy_staged=True),  # PR 6463
    Era(  # PRs 6604, 7005, 7014
        versions="v0.9.0", first=(0, 9), end=(0, 9, 1), stages_fsdp2=False, holds=False, merged_late=False
    ),
    Era(  # PR 7347
        versions="after v0.9.0",
        first=(0, 9, 1),
        end=_NEWER,
        stages_fsdp2=False,
        holds=False,
        merged_late=False,
        nonblocking=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of the run: where its settings are, in newer and older layouts, and what verl does with it.

    forward_only: it is under the policy whatever is asked for, never synced and never saved.
    """

    name: str
    sections: tuple[str, ...]
    strategies: tuple[str, ...]
    model: str
    checkpoint: str
    synced: bool = False
    forward_only: bool = False


_ACTOR = Role(
    name="actor",
    sections=("actor_rollout_ref.actor.fsdp_config",),
    strategies=("actor_rollout_ref.actor.strategy",),
    model="actor_rollout_ref.model",
    checkpoint="actor_rollout_ref.actor.checkpoint",
    synced=True,
)
_REF = Role(
    name="ref",
    sections=("actor_rollout_ref.ref.fsdp_config",),
    strategies=("actor_rollout_ref.ref.strategy", "actor_rollout_ref.actor.strategy"),
    model="actor_rollout_ref.model",
    checkpoint="",
    forward_only=True,
)
_CRITIC = Role(
    name="critic",
    sections=("critic.fsdp", "critic.model.fsdp_config"),
    strategies=("critic.strategy",),
    model="critic.model",
    checkpoint="critic.checkpoint",
)
_SFT = Role(name="model", sections=("engine",), strategies=("engine.strategy",), model="model", checkpoint="checkpoint")


def recognises(settings: Settings) -> bool:
    ppo = any(row.key.startswith(("actor_rollout_ref.", "critic.")) for row in settings)
    return ppo or any(f"engine.{key}" in settings for key in _SFT_KEYS)


def read(settings: Settings, given: Given) -> Reading:
    roles, notes = _roles(settings)
    world = given.world_size or _world_size(settings)
    uses: list[Use] = []
    found: list[ConfigFinding] = list(notes)
    for role in roles:
        try:
            read_as, more = _uses(role, settings, given, world)
            found += [*_conflicts(role, settings), *more]
        except Unreadable as error:
            use, finding = common.unreadable(role.name, error)
            read_as = (use,)
            found.append(finding)
        uses += read_as
        for section in role.sections:
            found += common.unknown_keys(settings, section, _KEYS)
    found += _misplaced(settings)
    if settings.first("defaults"):
        found.append(note("what Hydra's `defaults` bring in is not read; verl's own defaults are taken"))
    return Reading(uses=tuple(uses), findings=tuple(dict.fromkeys(found)))


def _roles(settings: Settings) -> tuple[list[Role], list[ConfigFinding]]:
    """The models that are built (trainer/ppo/utils.py), and a note on each that is configured and is not."""
    if not any(row.key.startswith(("actor_rollout_ref.", "critic.")) for row in settings):
        return [_SFT], []
    roles, notes = [_ACTOR], []
    if settings.flag("algorithm.use_kl_in_reward") or settings.flag("actor_rollout_ref.actor.use_kl_loss"):
        roles.append(_REF)
    elif settings.below("actor_rollout_ref.ref.fsdp_config"):
        notes.append(note("no reference model is built: neither use_kl_loss nor use_kl_in_reward is true"))
    estimator = settings.first("algorithm.adv_estimator")
    with_critic = settings.flag("critic.enable", default=estimator is None or estimator.value == "gae")
    if with_critic and (settings.below("critic") or estimator):
        roles.append(_CRITIC)
    elif settings.below("critic") and not with_critic:
        notes.append(note("no critic is built", settings.first("critic.enable") or estimator))
    return roles, notes


def _uses(
    role: Role, settings: Settings, given: Given, world: int | None
) -> tuple[tuple[Use, ...], list[ConfigFinding]]:
    strategy = settings.word(*role.strategies, *_keys(role, "strategy"), default="fsdp")
    if strategy not in _FSDP:
        row = settings.first(*role.strategies, *_keys(role, "strategy"))
        return (Use(role=role.name, why_not=f"not under FSDP1 or FSDP2: {row}"),), []
    eras = _eras(role, settings, given)
    uses = merged([_use(role, era, settings, world) for era in eras])
    sharded = _shard_group(role, settings, world)
    model = common.Model(path=settings.first(f"{role.model}.path"), ranks=sharded)
    uses, found = common.with_dims(uses, model)
    if _ENGINE in (era.versions for era in eras):
        found += _engine_strategy(role, settings)
    return uses, found


def _eras(role: Role, settings: Settings, given: Given) -> list[Era]:
    version = given.framework_version
    eras = [era for era in _ERAS if version is None or era.first <= version < era.end]
    if role is _SFT:  # It has the engine alone.
        named = {_ENGINE: "before v0.8.0"}
        return [
            dataclasses.replace(era, versions=named.get(era.versions, era.versions))
            for era in eras
            if era.versions != _LEGACY
        ]
    implementation = settings.word("trainer.use_legacy_worker_impl")
    left_out = {"disable": _LEGACY, "enable": _ENGINE, "auto": _ENGINE}.get(implementation)
    return [era for era in eras if era.versions != left_out]


def _use(role: Role, era: Era, settings: Settings, world: int | None) -> Use:
    scenario, reasons = _scenario(role, era, settings, world)
    return Use(
        role=role.name,
        versions=era.versions,
        scenario=scenario,
        reasons=reasons,
        extractions=(*_sync(role, era, settings, scenario), *_checkpoint(role, era, settings, scenario)),
    )


def _scenario(role: Role, era: Era, settings: Settings, world: int | None) -> tuple[Scenario, tuple[Reason, ...]]:
    reasons: list[Reason] = []

    def decided(axis: str, value: str, why: str) -> str:
        reasons.append(Reason(axis=axis, value=value, because=why))
        return value

    strategy_row = settings.first(*role.strategies, *_keys(role, "strategy"))
    orig_row = _row(role, settings, "use_orig_params")
    strategy = _FSDP[str(strategy_row.value) if strategy_row else "fsdp"]
    why = because(strategy_row, "verl's default")
    if strategy == "fsdp1" and settings.flag(*_keys(role, "use_orig_params")):
        strategy, why = "fsdp1-orig", f"{why}; {orig_row}"
    decided("strategy", strategy, why)
    offload = decided("offload", *_offload(role, settings, strategy))
    fields = {"strategy": strategy, "offload": offload, "staging": "unstaged"}
    if adapter := _lora(role, settings):
        fields["model"] = decided("model", "qwen3-lora", str(adapter))
    size = settings.number(*_keys(role, "fsdp_size"), default=-1) or -1
    if world and 0 < size < world:
        value = "size1" if size == 1 else "hsdp"
        fields["sharding"] = decided("sharding", value, f"{_row(role, settings, 'fsdp_size')} of {world} ranks")
    backend, why = _backend(role, era)
    if backend != "mixed":
        fields["backend"] = decided("backend", backend, why)
    draft = scenario_of(fields)
    if _nonblocking(draft, era):
        fields["transfer"] = decided(
            "transfer", "nonblocking", "verl/utils/fsdp_utils.py offloads with non_blocking=True"
        )
    return scenario_of(fields), tuple(reasons)


def _offload(role: Role, settings: Settings, strategy: str) -> tuple[str, str]:
    if role.forward_only:
        return "policy", "verl puts a model that only runs forward under the policy, whatever its flags say"
    flags = {"policy": "offload_policy", "param": "param_offload", "optimizer": "optimizer_offload"}
    if strategy != "fsdp2":
        del flags["policy"]
    on = [name for name, key in flags.items() if settings.flag(*_keys(role, key))]
    rows = [str(_row(role, settings, flags[name])) for name in on]
    return "+".join(on) or "none", "; ".join(rows) or "verl's default"


def _nonblocking(scenario: Scenario, era: Era) -> bool:
    """FSDP1's flat parameters and the optimizer's state are copied so in every version, FSDP2's since PR 7347."""
    if scenario.param_offload:
        return scenario.version == 1 or era.nonblocking
    return scenario.optimizer_offload


def _backend(role: Role, era: Era) -> tuple[str, str]:
    if role is _SFT:
        return "device-only", "verl/utils/distributed.py gives the SFT trainer NCCL alone"
    if role is _CRITIC:
        return era.critic_backend, "verl/workers/fsdp_workers.py gives a critic's own process NCCL alone"
    return "mixed", ""


def _sync(role: Role, era: Era, settings: Settings, scenario: Scenario) -> tuple[ExtractionPoint, ...]:
    """The weights for the rollout: get_per_tensor_param of the engine, rollout_mode of the worker."""
    if not role.synced:
        return ()
    staged = _sync_is_staged(era, scenario)
    weights = _extraction("weights for the rollout", scenario, staged, _sync_path(era, settings, scenario, staged))
    if era.asks_offloaded and settings.below("async_training"):
        return weights, _extraction("get_actor_weights_info for the rollout", scenario, False, "weights_info")
    return (weights,)


def _sync_is_staged(era: Era, scenario: Scenario) -> bool:
    if scenario.policy:
        return era.stages_policy
    if not era.stages:
        return scenario.param_offload
    return scenario.version == 1 or scenario.model == "qwen3-lora" or era.stages_fsdp2


def _sync_path(era: Era, settings: Settings, scenario: Scenario, staged: bool) -> str:
    if scenario.model == "qwen3-lora":
        if era.stages and settings.flag("actor_rollout_ref.model.lora.merge"):
            return "lora.merged.read_late" if era.merged_late and scenario.version == 2 else "lora.merged"
        layered = settings.flag("actor_rollout_ref.rollout.layered_summon")
        return "lora.layered_summon" if layered else "lora.adapter"
    if scenario.version == 1:
        return "sharded_state_dict.full_tensor"
    return "state_dict.held" if era.holds and staged and scenario.param_offload else "state_dict.to.full_tensor"


def _checkpoint(role: Role, era: Era, settings: Settings, scenario: Scenario) -> list[ExtractionPoint]:
    """save_checkpoint: the sharded state dict, and the whole model where ``hf_model`` is asked for."""
    if role.forward_only or not _saves(role, settings):
        return []
    staged = scenario.param_offload or (scenario.policy and scenario.version == 2 and era.saves_policy_staged)
    row = settings.first(f"{role.checkpoint}.save_contents")
    contents = row.value if row and isinstance(row.value, list) else ["model"]
    whole = "get_model_state_dict.full+cpu" if scenario.version == 2 else "full_state_dict.rank0+cpu"
    sharded = "state_dict" if scenario.version == 2 else "sharded_state_dict"
    paths = [path for name, path in (("model", sharded), ("hf_model", whole)) if name in contents]
    return [_extraction("checkpoint", scenario, staged, path) for path in paths]


def _saves(role: Role, settings: Settings) -> bool:
    """PPO saves every ``save_freq`` steps if that is positive, and by default not at all; SFT saves at its end."""
    return role is _SFT or (settings.number("trainer.save_freq", default=-1) or -1) > 0


def _extraction(purpose: str, scenario: Scenario, staged: bool, path: str) -> ExtractionPoint:
    staging = "staged" if staged else "unstaged"
    return ExtractionPoint(purpose=purpose, case=Case(scenario.changed(staging=staging), path))


def _conflicts(role: Role, settings: Settings) -> list[ConfigFinding]:
    rows = {key: _row(role, settings, key) for key in _OFFLOADS}
    on = {key: row for key, row in rows.items() if settings.flag(*_keys(role, key))}
    manual = [row for key, row in on.items() if key != "offload_policy"]
    strategy = settings.first(*role.strategies, *_keys(role, "strategy"))
    name = str(strategy.value) if strategy else "fsdp"
    found = _two_strategies(role, settings)
    if role.forward_only:
        if on:
            found.append(note(f"{role.name}: verl puts it under the policy whatever these say", *on.values()))
    elif "offload_policy" in on and name == "fsdp":
        sentence = f"{role.name}: offload_policy does nothing under FSDP1; strategy=fsdp2 is what reads it"
        found.append(conflict(sentence, on["offload_policy"], strategy))
    elif "offload_policy" in on and name == "fsdp2" and manual:
        sentence = (
            f"{role.name}: the policy and a manual offload are both on: the policy wins, the manual one does nothing"
        )
        found.append(conflict(sentence, on["offload_policy"], *manual))
    if name == "fsdp2" and settings.flag(*_keys(role, "use_orig_params")):
        found.append(note(f"{role.name}: FSDP2 does not read use_orig_params", _row(role, settings, "use_orig_params")))
    return found


def _misplaced(settings: Settings) -> list[ConfigFinding]:
    """An offload asked for where verl's FSDP does not read it."""
    sections = [section for role in (_ACTOR, _REF, _CRITIC, _SFT) for section in role.sections]
    found = []
    for row in settings:
        section, _, name = row.key.rpartition(".")
        other = any(word in section for word in _OTHER_ENGINES)
        if name in _OFFLOADS and section not in sections and not other and section.startswith(_ROOTS):
            near = difflib.get_close_matches(section, sections, n=1, cutoff=0)
            sentence = f"verl's FSDP does not read {name} in {section} (near it: {near[0]})"
            found.append(ConfigFinding(kind="unknown", sentence=sentence, settings=(str(row),)))
    return found


def _engine_strategy(role: Role, settings: Settings) -> list[ConfigFinding]:
    """The engine's own setting is ``fsdp`` by default, and until PR 5885 it followed no other."""
    inner = settings.first(*_keys(role, "strategy"))
    outer = settings.first(*role.strategies)
    if inner or not outer or outer.value == "fsdp":
        return []
    return [note(f"{role.name}: an engine before PR 5885, as in v0.7.1, is FSDP1 without fsdp_config.strategy", outer)]


def _two_strategies(role: Role, settings: Settings) -> list[ConfigFinding]:
    inner = settings.first(*_keys(role, "strategy"))
    outer = settings.first(*role.strategies)
    if not inner or not outer or inner.value == outer.value or inner.key == outer.key:
        return []
    sentence = f"{role.name}: two strategies: the engine follows the first since PR 5885 (v0.8.0), the second before it"
    return [conflict(sentence, outer, inner)]


def _keys(role: Role, key: str) -> list[str]:
    return [f"{section}.{key}" for section in role.sections]


def _row(role: Role, settings: Settings, key: str) -> Setting | None:
    return settings.first(*_keys(role, key))


def _lora(role: Role, settings: Settings) -> Setting | None:
    """The setting that asks for an adapter: lora_rank alone, for lora.rank is the Megatron engine's."""
    key = f"{role.model}.lora_rank"
    return settings.first(key) if (settings.number(key, default=0) or 0) > 0 else None


def _world_size(settings: Settings) -> int | None:
    """Eight on one node by default; unknown for the SFT trainer, whose ranks torchrun starts."""
    sft = not any(row.key.startswith(("actor_rollout_ref.", "critic.")) for row in settings)
    try:
        per_node = settings.number("trainer.n_gpus_per_node", default=None if sft else 8)
        nodes = settings.number("trainer.nnodes", default=1)
    except Unreadable:
        return None
    return per_node * nodes if per_node and nodes else None


def _shard_group(role: Role, settings: Settings, world: int | None) -> int | None:
    size = settings.number(*_keys(role, "fsdp_size"), default=-1) or -1
    return size if world and 0 < size < world else world
