"""accelerate: what ``accelerate launch`` can be told of FSDP, and the Accelerator's ways in and out."""

from __future__ import annotations

from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.frameworks.framework_matrix import (
    FrameworkAxis,
    FrameworkMatrix,
    FrameworkPath,
    Shim,
    model_axis,
    product,
)

_WITHOUT_LORA = {"model": ("qwen3", "uneven", "tied", "buffers")}
# Prepared together nothing trains, so there is nothing to resume.
_TRAINS = {"order": ("in-turn",)}

# What accelerate needs; those that build on it need it, too.
ACCELERATE_SHIMS = (
    Shim(
        name="ACCELERATE_TORCH_DEVICE",
        kind="variable",
        reason="accelerate's own way to be told of a device that it does not look for",
    ),
    Shim(
        name="accelerate.state:PartialState._prepare_backend",
        kind="function",
        reason="it asks for each device that accelerate knows, and takes any other machine for one without any",
    ),
    Shim(
        name="accelerate.utils.dataclasses:is_cuda_available",
        kind="function",
        reason="under sync_module_states the plug-in asks which device makes a module on meta real",
    ),
    Shim(name="torch.cuda:current_device", kind="function", reason="and then takes CUDA's current device"),
    Shim(
        name="torch.distributed:init_process_group",
        kind="function",
        reason="accelerate asks for nccl, which is the emulated device's own backend here",
    ),
)
ACCELERATE_VARIABLES = ("ACCELERATE_", "FSDP_")

ACCELERATE = FrameworkMatrix(
    name="accelerate",
    title="accelerate's Accelerator, configured as by `accelerate launch`",
    distributions=("accelerate", "transformers", "peft"),
    axes=(
        FrameworkAxis(
            name="version",
            always_in_id=True,
            values={
                "fsdp2": "fsdp_version: 2",
                "fsdp1": "fsdp_version: 1, fsdp_use_orig_params: false",
                "fsdp1-orig": "fsdp_version: 1, fsdp_use_orig_params: true",
            },
        ),
        FrameworkAxis(
            name="offload",
            always_in_id=True,
            values={"none": "fsdp_offload_params: false", "offload": "fsdp_offload_params: true"},
        ),
        FrameworkAxis(
            name="state_dict_type",
            always_in_id=True,
            values={"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"},
        ),
        FrameworkAxis(
            name="loading",
            values={
                "plain": "fsdp_cpu_ram_efficient_loading: false",
                "ram-efficient": "fsdp_cpu_ram_efficient_loading: true, the model from_pretrained",
            },
        ),
        FrameworkAxis(
            name="order",
            values={
                "in-turn": "FSDP1: prepare(model), then prepare(optimizer), as its documentation asks for",
                "together": "FSDP1: prepare(model, optimizer)",
            },
        ),
        model_axis("uneven", "tied", "buffers", "lora"),
    ),
    configurations=(
        *product(("fsdp2", "fsdp1", "fsdp1-orig"), ("none", "offload"), ("full", "sharded")),
        *product(("fsdp2", "fsdp1"), ("none", "offload"), ("full", "sharded"), ("ram-efficient",)),
        *product(("fsdp2", "fsdp1-orig"), ("none", "offload"), ("full", "sharded"), ("uneven", "tied", "lora")),
        *product(("fsdp2",), ("none", "offload"), ("full", "sharded"), ("", "ram-efficient"), ("buffers",)),
        *product(("fsdp1", "fsdp1-orig"), ("none",), ("full",), ("together",)),
    ),
    paths=(
        FrameworkPath(
            name="prepare",
            kind="prepare",
            summary="Accelerator.prepare(model, optimizer), accelerator.backward(loss), optimizer.step()",
        ),
        FrameworkPath(
            name="get_state_dict",
            kind="extraction",
            summary="accelerator.get_state_dict(model)",
            contract=Contract(device="cpu", ranks="rank0"),
        ),
        FrameworkPath(
            name="save_model",
            kind="extraction",
            summary="accelerator.save_model(model, directory)",
            contract=Contract(device="cpu", keys="any name"),
            only=_WITHOUT_LORA,
        ),
        FrameworkPath(
            name="save_state.merge_fsdp_weights",
            kind="extraction",
            summary="accelerator.save_state(directory), then accelerate.utils.merge_fsdp_weights",
            contract=Contract(device="cpu", keys="any name"),
            only={"state_dict_type": ("sharded",), **_WITHOUT_LORA},
        ),
        FrameworkPath(
            name="load_state",
            kind="rollback",
            summary="accelerator.save_state(directory), two steps, accelerator.load_state(directory)",
            only=_TRAINS,
        ),
        FrameworkPath(
            name="load_state.fresh",
            kind="resume",
            summary="accelerator.save_state(directory); in another process accelerator.load_state(directory)",
            only=_TRAINS,
        ),
    ),
    shims=ACCELERATE_SHIMS,
    own_variables=ACCELERATE_VARIABLES,
)
