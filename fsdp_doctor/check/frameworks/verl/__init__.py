"""verl: PPO and its relatives (actor, ref, critic), and the SFT trainers.

Read in verl's sources at v0.2.0.post2, v0.3.0.post1, v0.4.0 to v0.9.0 and main of August 2026: trainer/config/*.yaml
for the defaults, trainer/fsdp_sft_trainer.py (until v0.7.0) and sft_trainer.py, workers/fsdp_workers.py (removed by
PR 6067) and workers/engine/fsdp/transformer_impl.py for what is moved and read, utils/fsdp_utils.py for how,
utils/checkpoint/fsdp_checkpoint_manager.py for checkpoints, trainer/main_ppo.py for which models are built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_doctor.check.findings import ConfigFinding, note
from fsdp_doctor.check.frameworks.framework import Framework, Given, ModelReading, load_known_keys, not_under_fsdp
from fsdp_doctor.check.frameworks.verl import conflicts, models
from fsdp_doctor.check.frameworks.verl.models import CRITIC, REF, SFT, VerlModel, VerlVersions, built_models
from fsdp_doctor.check.launch_commands import SCRIPT
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, OffloadChoice, Role, Use, extraction, loading, use_of
from fsdp_doctor.matrix.axes import AxisName, Strategy
from fsdp_doctor.matrix.cases import Scenario

_FORWARD_ONLY = "verl puts a model that only runs forward under the policy, whatever its flags say"
_NONBLOCKING = "verl/utils/fsdp_utils.py offloads with non_blocking=True"


class Verl(Framework):
    name = "verl"
    read_in = "v0.2 to v0.9.0"
    distributions = ("verl",)
    keys = load_known_keys("verl")

    def recognizes(self, settings: Settings) -> bool:
        return models.is_ppo(settings) or models.is_sft(settings)

    def world_size(self, settings: Settings) -> int | None:
        """Eight on one node by default; for an SFT trainer what torchrun starts, unless it is the one on Ray."""
        per_node = settings.number("trainer.n_gpus_per_node", default=8 if models.is_ppo(settings) else None)
        nodes = settings.number("trainer.nnodes", default=1)
        return per_node * nodes if per_node and nodes else None

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        if engine := models.other_engine(settings):
            if not models.has_no_fsdp(engine):
                raise Unreadable(f"{engine}: this engine of verl has an FSDP of its own, which is not read")
            return {"actor" if models.is_ppo(settings) else "model": ()}
        if config := models.unknown_config(settings):
            raise Unreadable(f"{config}: what that configuration sets is not known; give its file beside the command")
        return {
            model.role: model.sections
            for model in built_models(settings)
            if model is not REF or models.versions_of(model, settings, given.framework_version)
        }

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        if engine := models.other_engine(settings):
            return not_under_fsdp(role, engine)
        (model,) = (model for model in built_models(settings) if model.role == role)
        ranges = models.versions_of(model, settings, given.framework_version)
        strategy = model.strategy(settings)
        if strategy is not None and ranges and all(versions.fsdp1_only for versions in ranges):
            strategy = Strategy.FSDP1
        if strategy is None:
            why = model.strategy_setting(settings)
            return not_under_fsdp(role, why, *conflicts.find_offload_conflicts(model, strategy, settings))
        if not ranges:
            raise Unreadable("that version of verl does not know what these settings ask for")
        return ModelReading(
            uses=[_read_use(model, strategy, versions, settings, given) for versions in ranges],
            model=model.table.configured_model(settings, given.world_size),
            findings=[
                *conflicts.find_offload_conflicts(model, strategy, settings),
                *conflicts.find_double_load(model, settings, ranges),
                *conflicts.find_useless_offload(model, strategy, settings, given.world_size),
                *conflicts.find_ignored_strategy(model, settings, ranges),
            ],
        )

    def findings(self, settings: Settings) -> list[ConfigFinding]:
        findings = [*conflicts.find_misplaced_offloads(settings), *_find_other_package(settings)]
        if models.is_ppo(settings) and not models.other_engine(settings):
            findings += _find_models_not_built(settings)
        if settings.first("defaults"):
            findings.append(note("Hydra's `defaults` are not followed; verl's own defaults are assumed"))
        return findings


def _read_use(model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings, given: Given) -> Use:
    """strategy: regardless of use_orig_params."""
    strategy = Strategy.FSDP1 if versions.fsdp1_only else strategy
    offload, adapter = _read_offload(model, settings, strategy), model.adapter(settings)
    chosen: dict[AxisName, Chosen] = {
        "strategy": _choose_strategy(model, strategy, versions, settings),
        "offload": offload.chosen,
        "model": Chosen("qwen3-lora", adapter) if adapter else Chosen("qwen3"),
        "sharding": model.table.sharding(settings, given.world_size),
        "backend": _choose_backend(model, versions),
        "transfer": _choose_transfer(strategy, offload, versions),
    }
    return use_of(
        model.role, versions.label, chosen, lambda scenario: _extraction_points(model, versions, settings, scenario)
    )


def _choose_strategy(model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings) -> Chosen:
    row, orig = model.strategy_setting(settings), model.keys("use_orig_params")
    why = str(row or "verl's default") if not versions.fsdp1_only else "verl has only FSDP1 before v0.4"
    if strategy == "fsdp1" and settings.flag(*orig):
        return Chosen("fsdp1-orig", f"{why}; {settings.first(*orig)}")
    return Chosen(strategy, why)


def _read_offload(model: VerlModel, settings: Settings, strategy: Strategy) -> OffloadChoice:
    """The policy is FSDP2's, and FSDP1's for the old SFT trainer."""
    if model.forward_only:
        return OffloadChoice(policy=_FORWARD_ONLY)
    reads_policy = (strategy == "fsdp1") if model.old_sft else (strategy == "fsdp2")
    manual = model.manual_offloads(settings)
    return OffloadChoice(
        policy=model.policy_setting(settings) if reads_policy else None,
        param=manual.get("param_offload"),
        optimizer=manual.get("optimizer_offload"),
        default="verl's default",
    )


def _choose_backend(model: VerlModel, versions: VerlVersions) -> Chosen:
    if model is CRITIC and versions.critic_backend != "mixed":
        return Chosen(versions.critic_backend, "verl/workers/fsdp_workers.py gives the critic's own process NCCL alone")
    return Chosen(
        versions.backend, None if versions.backend == "mixed" else "verl makes this process group with NCCL alone"
    )


def _choose_transfer(strategy: Strategy, offload: OffloadChoice, versions: VerlVersions) -> Chosen:
    """FSDP1's flat parameters and the optimizer's state are copied so in every version, FSDP2's since PR 7347."""
    moves_optimizer_alone = offload.optimizer and not offload.param
    moves_so = moves_optimizer_alone or (offload.param and (strategy != "fsdp2" or versions.nonblocking))
    return Chosen("nonblocking", _NONBLOCKING) if moves_so and not offload.policy else Chosen("blocking")


def _extraction_points(
    model: VerlModel, versions: VerlVersions, settings: Settings, scenario: Scenario
) -> Iterator[ExtractionPoint]:
    """The places where verl reads a model or loads it: the weights sync, and checkpoints."""
    if model.synced:
        staged = _sync_is_staged(versions, scenario)
        path = _sync_path(versions, settings, scenario, staged)
        yield extraction("weights for the rollout", scenario, path, staged=staged)
        if versions.asks_offloaded and settings.below("async_training"):
            yield extraction("get_actor_weights_info for the rollout", scenario, "weights_info")
    # PPO saves every ``save_freq`` steps if that is positive, and by default not at all; SFT saves at its end.
    is_sft = model is SFT or model.old_sft
    if model.checkpoint and (is_sft or (settings.number("trainer.save_freq") or -1) > 0):
        yield from _checkpoints(model, versions, settings, scenario)


def _sync_is_staged(versions: VerlVersions, scenario: Scenario) -> bool:
    """Whether get_per_tensor_param of the engine, or rollout_mode of the worker, moves the model first."""
    if scenario.policy:
        return versions.stages_policy
    if not versions.stages:
        return scenario.param_offload
    return scenario.strategy != "fsdp2" or scenario.model == "qwen3-lora" or versions.stages_fsdp2


def _sync_path(versions: VerlVersions, settings: Settings, scenario: Scenario, staged: bool) -> str:
    if scenario.model == "qwen3-lora":
        if versions.stages and settings.flag("actor_rollout_ref.model.lora.merge"):
            return "lora.merged.read_late" if versions.merged_late and scenario.strategy == "fsdp2" else "lora.merged"
        layered = settings.flag("actor_rollout_ref.rollout.layered_summon")
        return "lora.layered_summon" if layered else "lora.adapter"
    if scenario.strategy != "fsdp2":
        load_format = "" if versions.engine else settings.word("actor_rollout_ref.rollout.load_format")
        return "full_state_dict" if "hf" in load_format.split("_") else "sharded_state_dict.full_tensor"
    is_late = versions.reads_after_offload and staged and scenario.param_offload
    return "state_dict.held" if is_late else "state_dict.to.full_tensor"


def _checkpoints(
    model: VerlModel, versions: VerlVersions, settings: Settings, scenario: Scenario
) -> Iterator[ExtractionPoint]:
    """save_checkpoint: the sharded state dict, and the whole model where ``hf_model`` is asked for; and the resume."""
    is_fsdp2 = scenario.strategy == "fsdp2"
    whole = "get_model_state_dict.full+cpu" if is_fsdp2 else "full_state_dict.rank0+cpu"
    if versions.saves_whole:
        yield extraction("checkpoint", scenario, whole)
        return
    staged = scenario.param_offload or (scenario.policy and is_fsdp2 and versions.saves_policy_staged)
    row = settings.first(f"{model.checkpoint}.save_contents")
    contents = row.value if row and isinstance(row.value, list) else ["model"]
    paths = {"model": "state_dict" if is_fsdp2 else "sharded_state_dict", "hf_model": whole}
    for name, path in paths.items():
        if name in contents:
            yield extraction("checkpoint", scenario, path, staged=staged)
    # FSDPCheckpointManager.load_checkpoint, after load_fsdp_model_to_gpu where param_offload asks for it.
    yield loading("resume", scenario, "rank_files.model+optimizer", staged=scenario.param_offload)


def _find_other_package(settings: Settings) -> Iterator[ConfigFinding]:
    """A package with verl's settings that is not verl's may be a copy of it, with workers of its own."""
    script = settings.text(SCRIPT)
    module = re.fullmatch(r"(\w+)(?:\.\w+)+", script)
    if module is not None and module[1] not in ("verl", "recipe") and not script.endswith((".py", ".sh")):
        sentence = f"{module[1]} is not verl's own package: what is said here holds if its workers are those of verl"
        yield note(sentence, settings.first(SCRIPT))


def _find_models_not_built(settings: Settings) -> Iterator[ConfigFinding]:
    """A note on each model that has settings and is not built."""
    adapter = REF.adapter(settings)
    if adapter and models.asks_for_reference(settings):
        sentence = "no reference model is built: with an adapter the actor without it is the reference (ref_in_actor)"
        yield note(sentence, adapter)
    elif settings.below(REF.sections[0]) and not models.asks_for_reference(settings):
        yield note("no reference model is built since v0.4: neither use_kl_loss nor use_kl_in_reward is true")
    if settings.below("critic") and not models.has_critic(settings):
        yield note("no critic is built", settings.first("critic.enable", "algorithm.adv_estimator"))
