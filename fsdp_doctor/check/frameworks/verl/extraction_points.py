"""What verl reads from a model or loads into it, and whether it was staged then: the weights sync, and checkpoints."""

from __future__ import annotations

from fsdp_doctor.check.frameworks.verl.releases import SAVES_BY_MANAGER, VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import OLD_SFT, SFT, VerlModel
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import ExtractionPoint, extraction, loading
from fsdp_doctor.matrix.cases import Scenario


def of_model(
    model: VerlModel, versions: VerlVersions, settings: Settings, scenario: Scenario
) -> tuple[ExtractionPoint, ...]:
    sync = _sync(versions, settings, scenario) if model.synced else []
    saves = model.checkpoint and _saves(model, settings)
    return (*sync, *(_checkpoint(model, versions, settings, scenario) if saves else []))


def _sync(versions: VerlVersions, settings: Settings, scenario: Scenario) -> list[ExtractionPoint]:
    """The weights for the rollout: get_per_tensor_param of the engine, rollout_mode of the worker."""
    staged = _sync_is_staged(versions, scenario)
    found = [
        extraction("weights for the rollout", scenario, _sync_path(versions, settings, scenario, staged), staged=staged)
    ]
    if versions.asks_offloaded and settings.below("async_training"):
        found.append(extraction("get_actor_weights_info for the rollout", scenario, "weights_info"))
    return found


def _sync_is_staged(versions: VerlVersions, scenario: Scenario) -> bool:
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
        whole = not versions.engine and "hf" in settings.word("actor_rollout_ref.rollout.load_format")
        return "full_state_dict" if whole else "sharded_state_dict.full_tensor"
    return "state_dict.held" if versions.holds and staged and scenario.param_offload else "state_dict.to.full_tensor"


def _checkpoint(
    model: VerlModel, versions: VerlVersions, settings: Settings, scenario: Scenario
) -> list[ExtractionPoint]:
    """save_checkpoint: the sharded state dict, and the whole model where ``hf_model`` is asked for."""
    fsdp2 = scenario.strategy == "fsdp2"
    if model is OLD_SFT and versions is not SAVES_BY_MANAGER:
        path = "get_model_state_dict.full+cpu" if fsdp2 else "full_state_dict.rank0+cpu"
        return [extraction("checkpoint", scenario, path)]
    staged = scenario.param_offload or (scenario.policy and fsdp2 and versions.saves_policy_staged)
    row = settings.first(f"{model.checkpoint}.save_contents")
    contents = row.value if row and isinstance(row.value, list) else ["model"]
    paths = {
        "model": "state_dict" if fsdp2 else "sharded_state_dict",
        "hf_model": "get_model_state_dict.full+cpu" if fsdp2 else "full_state_dict.rank0+cpu",
    }
    saved = [
        extraction("checkpoint", scenario, path, staged=staged) for name, path in paths.items() if name in contents
    ]
    # FSDPCheckpointManager.load_checkpoint, after load_fsdp_model_to_gpu where param_offload asks for it.
    resume = loading("resume", scenario, "rank_files.model+optimizer", staged=scenario.param_offload)
    return [*saved, resume]


def _saves(model: VerlModel, settings: Settings) -> bool:
    """PPO saves every ``save_freq`` steps if that is positive, and by default not at all; SFT saves at its end."""
    return model in (SFT, OLD_SFT) or (settings.number("trainer.save_freq") or -1) > 0
