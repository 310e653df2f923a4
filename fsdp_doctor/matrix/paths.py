"""The extraction paths under test: their names, where they apply, and what each promises.

This table is read without torch. The functions behind the names are in ``case/paths``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_doctor.matrix.contracts import Contract

if TYPE_CHECKING:
    from fsdp_doctor.matrix.cases import Scenario


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way to extract weights.

    function: ``module:name`` in ``fsdp_doctor.case.paths``. summary: the path in code. used_by: where it is met.
    is_fix: it is ours; it runs with --fix.
    undoes_staging: its user moves a staged module back with ``model.to("cpu")`` before training on,
        which is what a module under CPUOffloadPolicy needs whatever was extracted from it.
    without_mesh: FSDP1 has it only for a model that was given no device mesh.
    offloads: it moves the shards off the device before it yields, and so promises their memory back.
    only: axes on which it makes sense for these values alone.
    """

    name: str
    fsdp: tuple[int, ...]
    contract: Contract
    function: str
    summary: str
    used_by: str = ""
    is_fix: bool = False
    undoes_staging: bool = False
    without_mesh: bool = False
    offloads: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def applies(self, scenario: Scenario) -> bool:
        """Whether it makes sense there at all; whether it works is for the probe to say."""
        on_axes = all(getattr(scenario, axis) in values for axis, values in self.only.items())
        return scenario.version in self.fsdp and on_axes


_WITH_ADAPTERS = {"model": ("qwen3-lora",)}
FIX = "full_tensors"

PATHS: tuple[Path, ...] = (
    Path(
        name="state_dict",
        fsdp=(2,),
        contract=Contract(form="sharded", device="parameter"),
        function="on_fsdp2:state_dict",
        summary="model.state_dict()",
        used_by="verl before PR 6463; torchtitan",
    ),
    Path(
        name="state_dict.to.full_tensor",
        fsdp=(2,),
        contract=Contract(),
        function="on_fsdp2:state_dict_to_full_tensor",
        summary="model.state_dict(), then tensor.to(device).full_tensor()",
        used_by="verl since PR 6463; TRL; SkyRL",
    ),
    Path(
        name="state_dict.held",
        fsdp=(2,),
        contract=Contract(),
        function="on_fsdp2:state_dict_held",
        summary="model.state_dict(), offload the model, then read what was taken",
        used_by="verl's torchtitan and automodel engines",
        offloads=True,
        only={"offload": ("param", "param+optimizer"), "staging": ("staged",)},
    ),
    Path(
        name="state_dict.full_tensor.to",
        fsdp=(2,),
        contract=Contract(),
        function="on_fsdp2:state_dict_full_tensor_to",
        summary="model.state_dict(), then tensor.full_tensor().to(device)",
        used_by="TRL AsyncGRPO's order of the two calls",
    ),
    Path(
        name="parameters.full_tensor",
        fsdp=(2,),
        contract=Contract(device="parameter", keys="parameters"),
        function="on_fsdp2:parameters_full_tensor",
        summary="model.named_parameters(), then parameter.full_tensor()",
        used_by="AReaL; vLLM's ModuleSource",
    ),
    Path(
        name="parameters.data.full_tensor",
        fsdp=(2,),
        contract=Contract(device="parameter", keys="parameters"),
        function="on_fsdp2:parameters_data_full_tensor",
        summary="model.named_parameters(), then parameter.data.full_tensor()",
    ),
    Path(
        name="get_model_state_dict.sharded",
        fsdp=(2,),
        contract=Contract(form="sharded", device="parameter"),
        function="on_fsdp2:model_state_dict_sharded",
        summary="get_model_state_dict(model)",
    ),
    Path(
        name="get_model_state_dict.sharded",
        fsdp=(1,),
        contract=Contract(form="sharded"),
        function="on_fsdp2:model_state_dict_sharded",
        summary="get_model_state_dict(model): the shards are made anew on the compute device",
    ),
    Path(
        name="get_model_state_dict.sharded+cpu",
        fsdp=(1, 2),
        contract=Contract(form="sharded", device="cpu"),
        function="on_fsdp2:model_state_dict_sharded_cpu",
        summary="get_model_state_dict(model, StateDictOptions(cpu_offload=True))",
    ),
    Path(
        name="get_model_state_dict.full",
        fsdp=(1, 2),
        contract=Contract(),
        function="on_fsdp2:model_state_dict_full",
        summary="get_model_state_dict(model, StateDictOptions(full_state_dict=True))",
    ),
    Path(
        name="get_model_state_dict.full+cpu",
        fsdp=(1, 2),
        contract=Contract(device="cpu", ranks="rank0"),
        function="on_fsdp2:model_state_dict_full_cpu",
        summary="get_model_state_dict(model, StateDictOptions(full_state_dict=True, cpu_offload=True))",
        used_by="verl PR 6188; accelerate",
    ),
    Path(
        name="unshard",
        fsdp=(2,),
        contract=Contract(dtype="compute", keys="parameters"),
        function="on_fsdp2:unshard",
        summary="module.unshard(), read its parameters, module.reshard(), module by module",
    ),
    Path(
        name="dcp",
        fsdp=(2,),
        contract=Contract(device="cpu"),
        function="on_fsdp2:dcp_save_and_load",
        summary="dcp.save(model.state_dict()), then dcp.load into unsharded CPU tensors",
    ),
    Path(
        name="from_local",
        fsdp=(2,),
        contract=Contract(keys="parameters"),
        function="on_fsdp2:from_local",
        summary="DTensor.from_local(parameter.to_local().to(device), mesh, placements).full_tensor()",
        used_by="AReaL",
    ),
    Path(
        name="summon_full_params",
        fsdp=(2,),
        contract=Contract(keys="parameters"),
        function="on_fsdp2:summon_full_params",
        summary="with FSDP.summon_full_params(model): model.named_parameters(); FSDP2 ignores it",
        used_by="verl's LoRA collection",
    ),
    Path(
        name="summon_full_params",
        fsdp=(1,),
        contract=Contract(keys="parameters"),
        function="on_fsdp1:summon_full_params",
        summary="with FSDP.summon_full_params(model): model.named_parameters()",
        used_by="verl's LoRA collection; TRL",
    ),
    Path(
        name="state_dict",
        fsdp=(1,),
        contract=Contract(),
        function="on_fsdp1:state_dict",
        summary="model.state_dict() with no state-dict type set",
    ),
    Path(
        name="full_state_dict",
        fsdp=(1,),
        contract=Contract(),
        function="on_fsdp1:full_state_dict",
        summary="model.state_dict() under FULL_STATE_DICT",
    ),
    Path(
        name="full_state_dict.rank0+cpu",
        fsdp=(1,),
        contract=Contract(device="cpu", ranks="rank0"),
        function="on_fsdp1:full_state_dict_rank0_cpu",
        summary="FULL_STATE_DICT with FullStateDictConfig(offload_to_cpu=True, rank0_only=True)",
        used_by="accelerate; the usual checkpoint",
    ),
    Path(
        name="sharded_state_dict",
        fsdp=(1,),
        contract=Contract(form="sharded"),
        function="on_fsdp1:sharded_state_dict",
        summary="model.state_dict() under SHARDED_STATE_DICT",
    ),
    Path(
        name="sharded_state_dict.full_tensor",
        fsdp=(1,),
        contract=Contract(),
        function="on_fsdp1:sharded_state_dict_full_tensor",
        summary="SHARDED_STATE_DICT, then tensor.to(device).full_tensor()",
        used_by="verl",
    ),
    Path(
        name="local_state_dict",
        fsdp=(1,),
        contract=Contract(form="flat", device="parameter"),
        function="on_fsdp1:local_state_dict",
        summary="model.state_dict() under LOCAL_STATE_DICT, on a model that was given no device mesh",
        without_mesh=True,
    ),
    Path(
        name="weights_info",
        fsdp=(1, 2),
        contract=Contract(form="info"),
        function="on_fsdp2:weights_info",
        summary="name, shape and dtype of every entry of model.state_dict()",
        used_by="verl's get_actor_weights_info (PR 4726)",
    ),
    Path(
        name="get_optimizer_state_dict",
        fsdp=(1, 2),
        contract=Contract(form="optimizer"),
        function="on_fsdp2:optimizer_state_dict",
        summary="get_optimizer_state_dict(model, optimizer, StateDictOptions(full_state_dict=True))",
    ),
    Path(
        name="lora.merged",
        fsdp=(1, 2),
        contract=Contract(weights="merged"),
        function="on_lora:merged",
        summary="merge the adapters in place, read each tensor, put the weights back",
        used_by="verl's lora.merge since PR 7014",
        only=_WITH_ADAPTERS,
    ),
    Path(
        name="lora.merged.read_late",
        fsdp=(2,),
        contract=Contract(weights="merged"),
        function="on_lora:merged_read_late",
        summary="merge in place, model.state_dict(), put the weights back, then read what was taken",
        used_by="verl's lora.merge before PR 7014",
        only=_WITH_ADAPTERS,
    ),
    Path(
        name="lora.adapter",
        fsdp=(1, 2),
        contract=Contract(weights="adapter"),
        function="on_lora:adapter",
        summary="get_peft_model_state_dict(model), each tensor on the device",
        only=_WITH_ADAPTERS,
    ),
    Path(
        name="lora.layered_summon",
        fsdp=(1, 2),
        contract=Contract(weights="adapter", device="cpu"),
        function="on_lora:layered_summon",
        summary="with FSDP.summon_full_params(layer): get_peft_model_state_dict, layer by layer, to the host",
        used_by="verl's layered_summon",
        only=_WITH_ADAPTERS,
    ),
    Path(
        name=FIX,
        fsdp=(1, 2),
        contract=Contract(weights="merged"),
        function="lookup:fix",
        summary="fsdp_doctor.full_tensors(model)",
        is_fix=True,
        undoes_staging=True,
    ),
)

PATH_NAMES: tuple[str, ...] = tuple(dict.fromkeys(path.name for path in PATHS))


def is_user_path(name: str) -> bool:
    """Whether ``name`` is a ``module:function`` of the user rather than a row of the table."""
    return ":" in name


def paths_for(scenario: Scenario) -> tuple[Path, ...]:
    """The rows that make sense in a scenario, the fix among them."""
    return tuple(path for path in PATHS if path.applies(scenario))


def impossible(path: Path, scenario: Scenario) -> str:
    """Why the path cannot be tried in the scenario, wherever it runs; empty if it can."""
    if path.contract.form == "optimizer" and scenario.phase == "fresh":
        return "there is no optimizer state before the first step"
    if path.without_mesh and scenario.sharding != "full":
        return f"{path.name} needs a model without a device mesh, and {scenario.sharding} is built with one"
    if path.contract.form == "flat" and scenario.strategy == "fsdp1-orig":
        return "torch has LOCAL_STATE_DICT only for use_orig_params=False"
    return scenario.contradiction


def find_path(name: str, fsdp: int) -> Path:
    """The row of that name for FSDP1 or FSDP2; a ``module:function`` gets a row of its own."""
    if is_user_path(name):
        return Path(name=name, fsdp=(1, 2), contract=Contract(), function=name, summary=f"{name}(model)")
    return next(path for path in PATHS if path.name == name and fsdp in path.fsdp)
