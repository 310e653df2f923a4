"""The point on the matrix's axes where verl has a model between steps, and what decided each value."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_doctor.check.frameworks.verl.releases import VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import CRITIC, VerlModel
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen
from fsdp_doctor.matrix.axes import AxisName, Strategy

_FORWARD_ONLY = "verl puts a model that only runs forward under the policy, whatever its flags say"
_NONBLOCKING = "verl/utils/fsdp_utils.py offloads with non_blocking=True"


def of_model(
    model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings, world_size: int | None
) -> Mapping[AxisName, Chosen]:
    """strategy: without a look at use_orig_params."""
    strategy = "fsdp1" if versions.fsdp1_only else strategy
    offload = _offload(model, settings, strategy)
    adapter = model.adapter(settings)
    return {
        "strategy": _strategy(model, strategy, versions, settings),
        "offload": offload,
        "model": Chosen("qwen3-lora", adapter) if adapter else Chosen("qwen3"),
        "sharding": model.table.sharding(settings, world_size),
        "backend": _backend(model, versions),
        "transfer": _transfer(strategy, offload.value, versions),
    }


def _strategy(model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings) -> Chosen:
    row = model.strategy_row(settings)
    why = str(row or "verl's default") if not versions.fsdp1_only else "verl has only FSDP1 before v0.4"
    orig = model.keys("use_orig_params")
    if strategy == "fsdp1" and settings.flag(*orig):
        return Chosen("fsdp1-orig", f"{why}; {settings.first(*orig)}")
    return Chosen(strategy, why)


def _offload(model: VerlModel, settings: Settings, strategy: Strategy) -> Chosen:
    """In the words of the axis; the policy is FSDP2's, and of FSDP1 that of the old SFT trainer."""
    if model.forward_only:
        return Chosen("policy", _FORWARD_ONLY)
    old_sft = len(model.policy) > 1
    flags = {"param": "param_offload", "optimizer": "optimizer_offload"}
    on = {word: settings.first(*model.keys(name)) for word, name in flags.items() if settings.flag(*model.keys(name))}
    policy = model.under_policy(settings)
    if policy is not None and (strategy == "fsdp2") != old_sft:
        on = {"policy": policy, **on}
    return Chosen("+".join(on) or "none", "; ".join(map(str, on.values())) or "verl's default")


def _backend(model: VerlModel, versions: VerlVersions) -> Chosen:
    if model is CRITIC and versions.critic_backend != "mixed":
        return Chosen(versions.critic_backend, "verl/workers/fsdp_workers.py gives the critic's own process NCCL alone")
    if versions.backend != "mixed":
        return Chosen(versions.backend, "verl makes this process group with NCCL alone")
    return Chosen("mixed")


def _transfer(strategy: Strategy, offload: str, versions: VerlVersions) -> Chosen:
    """FSDP1's flat parameters and the optimizer's state are copied so in every version, FSDP2's since PR 7347."""
    if "policy" in offload:
        return Chosen("blocking")
    params = "param" in offload and (strategy != "fsdp2" or versions.nonblocking)
    nonblocking = params or offload == "optimizer"
    return Chosen("nonblocking", _NONBLOCKING) if nonblocking else Chosen("blocking")
