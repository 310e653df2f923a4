"""The point on the matrix's axes where verl has a model between steps, and what decided each value."""

from __future__ import annotations

from fsdp_doctor.check.frameworks.verl.releases import VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import CRITIC, SFT, VerlModel
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Reason, because, reasons_of
from fsdp_doctor.matrix.axes import AxisName, Backend, Sharding, Strategy
from fsdp_doctor.matrix.cases import Scenario

# The flags by their words in a value of the axis, in its order.
_FLAGS = {"policy": "offload_policy", "param": "param_offload", "optimizer": "optimizer_offload"}
_FORWARD_ONLY = "verl puts a model that only runs forward under the policy, whatever its flags say"


def of_model(
    model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings, world_size: int | None
) -> tuple[Scenario, tuple[Reason, ...]]:
    """The scenario, unstaged, and its reasons. strategy: without a look at use_orig_params."""
    strategy_why = because(model.strategy_row(settings), "verl's default")
    if strategy == "fsdp1" and settings.flag(*model.keys("use_orig_params")):
        strategy = "fsdp1-orig"
        strategy_why = f"{strategy_why}; {settings.first(*model.keys('use_orig_params'))}"
    offload, offload_why = _offload(model, settings, strategy)
    adapter = _lora(model, settings)
    backend, backend_why = _backend(model, versions)
    sharding = _sharding(model, settings, world_size)
    scenario = Scenario(
        strategy=strategy,
        offload="none",
        staging="unstaged",
        model="qwen3-lora" if adapter else "qwen3",
        backend=backend,
        sharding=sharding,
    ).changed(offload=offload)
    nonblocking = _is_nonblocking(scenario, versions)
    if nonblocking:
        scenario = scenario.changed(transfer="nonblocking")
    fsdp_size = f"{settings.first(*model.keys('fsdp_size'))} of {world_size} ranks"
    whys: dict[AxisName, str] = {
        "strategy": strategy_why,
        "offload": offload_why,
        "model": because(adapter, ""),
        "sharding": fsdp_size if sharding != "full" else "",
        "backend": backend_why if backend != "mixed" else "",
        "transfer": "verl/utils/fsdp_utils.py offloads with non_blocking=True" if nonblocking else "",
    }
    return scenario, reasons_of(scenario, whys)


def shard_group(model: VerlModel, settings: Settings, world_size: int | None) -> int | None:
    """The ranks of one shard group."""
    size = model.fsdp_size(settings)
    return size if world_size and 0 < size < world_size else world_size


def _offload(model: VerlModel, settings: Settings, strategy: Strategy) -> tuple[str, str]:
    if model.forward_only:
        return "policy", _FORWARD_ONLY
    flags = _FLAGS if strategy == "fsdp2" else {word: name for word, name in _FLAGS.items() if word != "policy"}
    on = {word: model.keys(name) for word, name in flags.items() if settings.flag(*model.keys(name))}
    rows = [str(settings.first(*keys)) for keys in on.values()]
    return "+".join(on) or "none", "; ".join(rows) or "verl's default"


def _lora(model: VerlModel, settings: Settings) -> Setting | None:
    """The setting that asks for an adapter: lora_rank alone, for lora.rank is the Megatron engine's."""
    key = f"{model.model}.lora_rank"
    return settings.first(key) if (settings.number(key) or 0) > 0 else None


def _sharding(model: VerlModel, settings: Settings, world_size: int | None) -> Sharding:
    size = model.fsdp_size(settings)
    if not world_size or not 0 < size < world_size:
        return "full"
    return "size1" if size == 1 else "hsdp"


def _backend(model: VerlModel, versions: VerlVersions) -> tuple[Backend, str]:
    if model is SFT:
        return "device-only", "verl/utils/distributed.py gives the SFT trainer NCCL alone"
    if model is CRITIC:
        return versions.critic_backend, "verl/workers/fsdp_workers.py gives the critic's own process NCCL alone"
    return "mixed", ""


def _is_nonblocking(scenario: Scenario, versions: VerlVersions) -> bool:
    """FSDP1's flat parameters and the optimizer's state are copied so in every version, FSDP2's since PR 7347."""
    if scenario.param_offload:
        return scenario.strategy != "fsdp2" or versions.nonblocking
    return scenario.optimizer_offload
