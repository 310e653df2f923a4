"""Checks that a model was built with the settings that its scenario's id names.

The actual facts are read from the model, the optimizer and the process group. The expected facts are derived only from
the id. Neither side uses the other, or the code that builds the model. Only metadata is read, so nothing waits for a
copy in flight, and no collective is called.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from typing_extensions import assert_never

from fsdp_doctor.case import models
from fsdp_doctor.matrix.axes import Backend, CheckpointFit, Model, OffloadWay, Optimizer, Sharding, Strategy
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.reader import ModelContents

UnitKind: TypeAlias = Literal["root", "decoder layer", "embedding", "adapter", "other"]
# For each dim of a mesh, whether it replicates or shards, and over how many ranks.
Spread: TypeAlias = tuple[tuple[Literal["replicated", "sharded"], int], ...]


@dataclass(frozen=True, kw_only=True)
class BuiltFacts:
    """Facts about a built model. None means that a fact is not required, or that the model does not show it.

    units: the number of FSDP modules of each kind.
    groups: the number of process groups.
    spreads: for each mesh of the parameters, the number of ranks that each dim replicates or shards over.
    policy: the offload policies; for FSDP2, also whether they pin memory.
    casts_to, reduces_in: the param_dtype and reduce_dtype of mixed precision.
    dtypes: the dtypes of the parameters.
    shards_on: the device types of the parameters' shards.
    shown_on: the device types that the parameters report.
    pinned: whether the shards in host memory are pinned.
    moments_on: the device types of the optimizer's state, except step counters.
    optimizer: the kind of optimizer.
    comes_for_step: whether hooks of the optimizer bring its state to the device for a step.
    has_stepped: whether the optimizer has a state.
    open_step: the part of a training step that has begun and has not ended.
    model: the name of the model's class.
    backends: the backend of each device type.
    ranks: the number of ranks.
    """

    strategy: Strategy | Literal["several", "none"] | None = None
    units: Mapping[UnitKind, int] | None = None
    spreads: frozenset[Spread] | None = None
    groups: int | None = None
    policy: frozenset[Literal["none", "cpu", "pinned", "unpinned"]] | None = None
    casts_to: frozenset[torch.dtype | None] | None = None
    reduces_in: frozenset[torch.dtype | None] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    shards_on: frozenset[str] | None = None
    shown_on: frozenset[str] | None = None
    pinned: frozenset[bool] | None = None
    moments_on: frozenset[str] | None = None
    comes_for_step: bool | None = None
    optimizer: Optimizer | Literal["another"] | None = None
    has_stepped: bool | None = None
    open_step: Literal["forward", "backward", "none"] | None = None
    model: str | None = None
    is_tied: bool | None = None
    has_adapters: bool | None = None
    is_quantized: bool | None = None
    is_in_float8: bool | None = None
    is_in_mxfp8: bool | None = None
    has_buffers: bool | None = None
    has_even_vocabulary: bool | None = None
    backends: Mapping[str, str] | None = None
    ranks: int | None = None


class NotAsNamed(Exception):
    """Error for a model that does not match its scenario's id: a bug of fsdp-doctor, not a finding about torch."""


def find_mismatches(actual: BuiltFacts, asked: BuiltFacts) -> list[str]:
    """Returns a text for each fact that differs from the expected fact: the fact's name and both values."""
    return [
        f"{field.name}: {_put_into_words(getattr(actual, field.name))} instead of {_put_into_words(wanted)}"
        for field in dataclasses.fields(BuiltFacts)
        if (wanted := getattr(asked, field.name)) is not None and getattr(actual, field.name) != wanted
    ]


def check(model: nn.Module, optimizer: torch.optim.Optimizer, scenario: Scenario, *, device: str, ranks: int) -> None:
    """Raises NotAsNamed if the model does not match the scenario's id.

    It must be called right before the method under test. The check is local to a rank.

    device: the type of the compute device.
    ranks: the number of ranks that the run should have.
    """
    different = find_mismatches(read_facts(model, optimizer), derive_facts(scenario, device=device, ranks=ranks))
    if different:
        raise NotAsNamed(f"{scenario.id} was not built as its id says: {'; '.join(different)}")


# What is found


def read_facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> BuiltFacts:
    """Reads the facts of a sharded model in any state, its optimizer, and the default process group."""
    contents = reader.read(model)
    names = {name for every in contents.list_all_names() for name in every}
    parameters = list(_list_parameters(contents))
    locals_ = [private.read_local_tensor(parameter) for parameter in parameters]
    state = [value for values in optimizer.state.values() for value in values.values()]
    moments = [private.read_local_tensor(value) for value in state if isinstance(value, torch.Tensor) and value.ndim]
    plain = model.module if isinstance(model, FullyShardedDataParallel) else model
    config: Any = getattr(plain, "config", None)
    text = config.get_text_config() if config is not None else None
    on_host = [local for local in locals_ if local.device.type == "cpu" and local.numel()]
    return BuiltFacts(
        strategy=recognize_strategy(contents),
        units=Counter(_list_unit_kinds(model)),
        spreads=frozenset(_list_spreads(contents)),
        groups=len({id(group) for group in _list_groups(contents)}),
        policy=frozenset(list_policies(contents)),
        casts_to=frozenset(param for param, _ in _list_precisions(contents)),
        reduces_in=frozenset(reduce for _, reduce in _list_precisions(contents)),
        dtypes=frozenset(parameter.dtype for parameter in parameters),
        shards_on=frozenset(local.device.type for local in locals_),
        shown_on=frozenset(parameter.device.type for parameter in parameters),
        pinned=frozenset(local.is_pinned() for local in on_host),
        moments_on=frozenset(moment.device.type for moment in moments),
        comes_for_step=any(map(_moves_state, private.list_optimizer_hooks(optimizer))),
        optimizer=_recognize_optimizer(optimizer),
        has_stepped=bool(state),
        open_step=reader.find_open_step(model, contents) or "none",
        model=_name_class(plain),
        is_tied=any(len(every) > 1 for every in contents.list_all_names()),
        has_adapters=any(".lora_" in name for name in names),
        is_quantized=any(hasattr(module, "quant_state") for module in model.modules()),
        is_in_float8=any("Float8Linear" in type(module).__name__ for module in model.modules()),
        is_in_mxfp8=any("MXFP8" in _name_local_class(parameter) for parameter in parameters),
        has_buffers=bool(contents.buffers),
        has_even_vocabulary=text.vocab_size % 2 == 0 if text is not None else None,
        # Of the default process group, by device type.
        backends=dict(pair.split(":", 1) for pair in dist.get_backend_config().split(",")),
        ranks=dist.get_world_size(),
    )


def _moves_state(hook: Any) -> bool:
    """Returns whether an optimizer's hook belongs to the trainer, and not to fsdp-doctor's measurement of memory."""
    return not str(getattr(hook, "__module__", "")).startswith("fsdp_doctor.examination.")


def _recognize_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer | Literal["another"]:
    """Returns the axis value of an optimizer, recognized by its class and options."""
    group = optimizer.param_groups[0]
    match type(optimizer).__name__:
        case "SGD":
            return Optimizer.SGD
        case "Muon":
            return Optimizer.MUON
        case "Adafactor":
            return Optimizer.ADAFACTOR
        case "AdamW8bit":
            return Optimizer.ADAMW_8BIT
        case "AdamW":
            if group["fused"]:
                return Optimizer.ADAMW_FUSED
            if group["capturable"]:
                return Optimizer.ADAMW_CAPTURABLE
            return Optimizer.TENSOR_LR if isinstance(group["lr"], torch.Tensor) else Optimizer.ADAMW
        case _:
            return "another"


def _name_local_class(parameter: torch.Tensor) -> str:
    """Returns the class name of a parameter's shard."""
    with torch.no_grad():
        return type(parameter.to_local() if isinstance(parameter, DTensor) else parameter).__name__


def _list_parameters(contents: ModelContents) -> Iterator[torch.Tensor]:
    for unit in contents.fsdp1_units:
        # While the unit is unsharded, its flat parameter is another tensor, in the dtype of the computation; with one
        # rank in the shard group it has the shape of the shard.
        flat, shard = unit.flat_parameter, unit.shard
        yield flat if (flat.shape, flat.dtype) == (shard.shape, shard.dtype) else shard
    yield from (parameter.tensor for parameter in contents.parameters)


def recognize_strategy(contents: ModelContents) -> Strategy | Literal["several", "none"]:
    """Returns the strategy that shards a model; ``several`` for a mixture, ``none`` for an unsharded model."""
    strategies = {Strategy.FSDP1_ORIG if unit.keeps_originals else Strategy.FSDP1 for unit in contents.fsdp1_units}
    strategies |= {Strategy.FSDP2} if contents.fsdp2_units else set()
    if len(strategies) > 1:
        return "several"
    return strategies.pop() if strategies else "none"


def _list_unit_kinds(model: nn.Module) -> Iterator[UnitKind]:
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule | FullyShardedDataParallel):
            continue
        inner: Any = module.module if isinstance(module, FullyShardedDataParallel) else module
        if module is model:
            yield "root"
        elif ".lora_" in name:
            yield "adapter"
        elif isinstance(inner, nn.Embedding):
            yield "embedding"
        else:
            yield "decoder layer" if _name_class(inner).endswith("DecoderLayer") else "other"


def _list_spreads(contents: ModelContents) -> Iterator[Spread]:
    for parameter in contents.parameters:
        tensor = parameter.tensor
        if isinstance(tensor, DTensor):
            yield tuple(
                ("replicated" if placement.is_replicate() else "sharded", int(size))
                for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            )
    for unit in contents.fsdp1_units:
        replicas = unit.replica_group
        sharded: Spread = (("sharded", unit.group.size()),)
        yield sharded if replicas is None else (("replicated", replicas.size()), *sharded)


def _list_groups(contents: ModelContents) -> Iterator[Any]:
    for parameter in contents.parameters:
        if isinstance(parameter.tensor, DTensor):
            yield from parameter.tensor.device_mesh.get_all_groups()
    yield from (unit.group for unit in contents.fsdp1_units)


def list_policies(contents: ModelContents) -> Iterator[Literal["none", "cpu", "pinned", "unpinned"]]:
    """Yields each FSDP unit's offload policy. FSDP1's is ``cpu``, because CPUOffload does not say whether it pins."""
    for unit in contents.fsdp2_units:
        if isinstance(unit.policy, CPUOffloadPolicy):
            yield "pinned" if unit.policy.pin_memory else "unpinned"
        else:
            yield "none"
    yield from ("cpu" if unit.offloads else "none" for unit in contents.fsdp1_units)


def _list_precisions(contents: ModelContents) -> Iterator[tuple[torch.dtype | None, torch.dtype | None]]:
    for unit in contents.fsdp2_units:
        yield unit.mixed_precision.param_dtype, unit.mixed_precision.reduce_dtype
    for flat_unit in contents.fsdp1_units:
        precision: Any = flat_unit.module.mixed_precision
        yield precision.param_dtype, precision.reduce_dtype


def _name_class(module: nn.Module) -> str:
    """Returns the class name of the model that was given to FSDP and peft, without the prefix that fully_shard adds."""
    get_base_model = getattr(module, "get_base_model", None)
    base = get_base_model() if get_base_model is not None else module
    return type(base).__name__.removeprefix("FSDP").removeprefix("Replicate")


def _put_into_words(fact: Any) -> str:
    if isinstance(fact, frozenset):
        return " and ".join(sorted(map(str, fact))) or "nothing"
    return ", ".join(f"{many} {what}" for what, many in fact.items()) if isinstance(fact, Counter) else str(fact)


# What is asked for

_ADAPTED_LINEARS = 7


def derive_facts(scenario: Scenario, *, device: str, ranks: int) -> BuiltFacts:
    """Derives from the id of a scenario the facts that must hold when the method is called.

    Facts that depend on the configuration of a user's model are left out.

    device: the type of the compute device.
    ranks: the number of ranks that the run should have.
    """
    built_in = not scenario.model.is_custom
    casts = scenario.precision.casts
    return BuiltFacts(
        strategy=scenario.strategy,
        units=_derive_units(scenario) if built_in else None,
        spreads=_derive_spreads(scenario, ranks),
        groups=_derive_groups(scenario),
        policy=_derive_policies(scenario, device),
        casts_to=frozenset({torch.bfloat16 if casts else None}),
        reduces_in=frozenset({torch.float32 if casts else None}),
        dtypes=_derive_dtypes(scenario),
        shards_on=_derive_shard_devices(scenario, device),
        shown_on=frozenset({device}) if scenario.staging.is_staged and scenario.version == 2 else None,
        pinned=_derive_pinned(scenario, device),
        moments_on=_derive_moment_devices(scenario, device),
        comes_for_step=scenario.offload.way is OffloadWay.AROUND_STEP,
        optimizer=scenario.optimizer,
        has_stepped=scenario.phase.is_trained,
        open_step=scenario.phase.raised or "none",
        model=_derive_class(scenario.model),
        is_tied=scenario.model.is_tied if built_in else None,
        has_adapters=scenario.model.has_adapters if built_in else None,
        is_quantized=scenario.model.is_quantized if built_in else None,
        is_in_float8=scenario.model is Model.QWEN3_FLOAT8 if built_in else None,
        is_in_mxfp8=scenario.model is Model.QWEN3_MXFP8 if built_in else None,
        has_buffers=scenario.model.has_buffers if built_in else None,
        has_even_vocabulary=scenario.dims.is_even if built_in else None,
        backends=_derive_backends(scenario, device),
        ranks=ranks,
    )


def _derive_class(model: Model) -> str | None:
    match model:
        case (
            Model.QWEN3
            | Model.QWEN3_TIED
            | Model.QWEN3_BUFFERS
            | Model.QWEN3_LORA
            | Model.QWEN3_QLORA
            | Model.QWEN3_QLORA_BF16
            | Model.QWEN3_FLOAT8
            | Model.QWEN3_MXFP8
        ):
            return "Qwen3ForCausalLM"
        case Model.QWEN2:
            return "Qwen2ForCausalLM"
        case Model.QWEN3_MOE:
            return "Qwen3MoeForCausalLM"
        case Model.QWEN3_5:
            return "Qwen3_5ForCausalLM"
        case Model.CUSTOM:
            return None
        case _:
            assert_never(model)


def _derive_dtypes(scenario: Scenario) -> frozenset[torch.dtype] | None:
    is_moved = scenario.offload.takes_shards_away or scenario.staging.is_staged
    if scenario.version == 1 and scenario.phase.raised and is_moved:
        # A manual offload replaces the shard of a unit that is unsharded by what the unit computes with.
        return None
    is_in_bf16 = scenario.checkpoint is CheckpointFit.FP32 or scenario.model.is_in_bf16
    return frozenset({torch.bfloat16 if is_in_bf16 else torch.float32})


def _derive_units(scenario: Scenario) -> Counter[UnitKind]:
    units: Counter[UnitKind] = Counter({"root": 1, "decoder layer": models.NUM_LAYERS})
    if scenario.version == 2 and not scenario.model.is_tied:
        units["embedding"] = 1
    if scenario.sharding.divides_experts:
        units["other"] = models.NUM_LAYERS
    if scenario.version == 1 and scenario.model.has_adapters:
        units["adapter"] = 2 * _ADAPTED_LINEARS * models.NUM_LAYERS
    return units


def _derive_spreads(scenario: Scenario, ranks: int) -> frozenset[Spread]:
    match scenario.sharding:
        case Sharding.FULL | Sharding.EXPERTS:
            return frozenset({(("sharded", ranks),)})
        case Sharding.HSDP:
            return frozenset({(("replicated", ranks // 2), ("sharded", 2))})
        case Sharding.SIZE1:
            return frozenset({(("replicated", ranks), ("sharded", 1))})
        case Sharding.REPLICATE:
            return frozenset({(("replicated", ranks),)})
        case Sharding.TP:
            alone: Spread = (("sharded", ranks // 2),)
            return frozenset({alone, (*alone, ("sharded", 2))})
        case Sharding.EXPERTS_2D:
            return frozenset({(("sharded", ranks),), (("sharded", ranks // 2), ("sharded", 2))})
        case Sharding.HIDDEN_EXPERTS:
            return frozenset({(("sharded", ranks),), (("sharded", ranks // 2),)})
        case _:
            assert_never(scenario.sharding)


def _derive_groups(scenario: Scenario) -> int | None:
    match scenario.sharding:
        case Sharding.FULL | Sharding.REPLICATE:
            return 1
        case Sharding.EXPERTS:
            return 2
        case Sharding.HSDP | Sharding.SIZE1:
            return 2 if scenario.version == 2 else 1
        case Sharding.TP | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
            return None
        case _:
            assert_never(scenario.sharding)


def _derive_policies(scenario: Scenario, device: str) -> frozenset[Literal["none", "cpu", "pinned", "unpinned"]] | None:
    if scenario.offload.way is OffloadWay.BY_PARAMETER:
        # A mapping, and not one of torch's policies.
        return None
    if not scenario.offload.takes_policy:
        return frozenset({"none"})
    # Without an accelerator there is nothing to pin memory for.
    pinned: Literal["pinned", "unpinned"] = "pinned" if scenario.pinning.is_pinned and device != "cpu" else "unpinned"
    policy: Literal["cpu", "pinned", "unpinned"] = "cpu" if scenario.version == 1 else pinned
    return frozenset({policy, "none"} if scenario.offload.way is OffloadWay.PARTIAL else {policy})


def _derive_shard_devices(scenario: Scenario, device: str) -> frozenset[str] | None:
    if scenario.init.is_meta:
        return frozenset({"meta"})
    if scenario.offload.takes_policy and scenario.version == 2 and scenario.staging.is_staged:
        # Where a model.to(device) under CPUOffloadPolicy puts the shards is up to torch.
        return None
    if scenario.offload.way in (OffloadWay.PARTIAL, OffloadWay.BY_PARAMETER):
        return frozenset({"cpu", device})
    is_away = scenario.offload.takes_shards_away and not scenario.staging.is_staged
    return frozenset({"cpu" if scenario.policy or is_away else device})


def _derive_pinned(scenario: Scenario, device: str) -> frozenset[bool] | None:
    on = _derive_shard_devices(scenario, device)
    if device == "cpu" or on is None:
        return None
    if "cpu" not in on:
        return frozenset() if on == frozenset({device}) else None
    if scenario.offload.takes_policy and scenario.version == 2:
        return frozenset({scenario.pinning.is_pinned})
    if scenario.offload.takes_policy:
        # FSDP1 pins when it first runs.
        return frozenset({True}) if scenario.phase.is_trained else None
    if scenario.offload.way is OffloadWay.MOVED:
        return frozenset({True})
    return frozenset({False}) if scenario.transfer.is_blocking else None


def _derive_moment_devices(scenario: Scenario, device: str) -> frozenset[str]:
    if not scenario.phase.is_trained:
        return frozenset()
    if scenario.offload.way in (OffloadWay.PARTIAL, OffloadWay.BY_PARAMETER):
        return frozenset({"cpu", device})
    return frozenset({"cpu" if scenario.policy or scenario.offload.takes_optimizer_away else device})


def _derive_backends(scenario: Scenario, device: str) -> dict[str, str] | None:
    if device == "cpu":
        # torch lists gloo for accelerators that are not there, too.
        return None
    of_device = {device: dist.get_default_backend_for_device(device)}
    match scenario.backend:
        case Backend.MIXED:
            return {"cpu": "gloo"} | of_device
        case Backend.DEVICE_ONLY:
            return of_device
        case _:
            assert_never(scenario.backend)
