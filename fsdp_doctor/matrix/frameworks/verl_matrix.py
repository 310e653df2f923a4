"""verl: what its FSDP engine can be told, and the engine's ways in and out."""

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

_OFFLOADS = {
    "none": "no offload",
    "param": "param_offload",
    "optimizer": "optimizer_offload",
    "policy": "offload_policy (FSDP2's CPUOffloadPolicy; FSDP1 has none)",
    "param+optimizer": "param_offload, optimizer_offload",
    "param+policy": "param_offload, offload_policy",
    "optimizer+policy": "optimizer_offload, offload_policy",
    "param+optimizer+policy": "param_offload, optimizer_offload, offload_policy",
}
_FEW_OFFLOADS = ("none", "param+optimizer", "policy")
_FULL = {"model": ("qwen3", "uneven", "tied")}
_ADAPTER = {"model": ("lora",), "lora": ("apart",)}

VERL = FrameworkMatrix(
    name="verl",
    title="verl's FSDPEngineWithLMHead, as its actor workers make it",
    distributions=("verl", "transformers", "peft", "tensordict"),
    axes=(
        FrameworkAxis(
            name="strategy", always_in_id=True, values={"fsdp2": "strategy: fsdp2", "fsdp": "strategy: fsdp"}
        ),
        FrameworkAxis(name="offload", always_in_id=True, values=_OFFLOADS),
        FrameworkAxis(
            name="lora",
            values={
                "apart": "model.lora.merge: false, the rollout is given the adapter",
                "merge": "model.lora.merge: true, the rollout is given merged weights",
            },
        ),
        model_axis("uneven", "tied", "lora"),
    ),
    configurations=(
        *product(("fsdp2", "fsdp"), _OFFLOADS),
        *product(("fsdp2", "fsdp"), _FEW_OFFLOADS, ("uneven", "tied", "lora")),
        *product(("fsdp2", "fsdp"), _FEW_OFFLOADS, ("merge",), ("lora",)),
    ),
    paths=(
        FrameworkPath(
            name="initialize",
            kind="prepare",
            summary="FSDPEngineWithLMHead(...).initialize(), then train_mode, optimizer_step",
        ),
        FrameworkPath(
            name="get_per_tensor_param",
            kind="extraction",
            summary="engine.get_per_tensor_param()",
            contract=Contract(dtype="any"),
            only=_FULL,
        ),
        FrameworkPath(
            name="get_per_tensor_param.adapter",
            kind="extraction",
            summary="engine.get_per_tensor_param(base_sync_done=True)",
            contract=Contract(device="any", weights="adapter"),
            only=_ADAPTER,
        ),
        FrameworkPath(
            name="get_per_tensor_param.layered",
            kind="extraction",
            summary="engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)",
            contract=Contract(device="any", weights="adapter"),
            only=_ADAPTER,
        ),
        FrameworkPath(
            name="get_per_tensor_param.merged",
            kind="extraction",
            summary="engine.get_per_tensor_param() with model.lora.merge",
            contract=Contract(dtype="any", weights="merged"),
            only={"lora": ("merge",)},
        ),
        FrameworkPath(
            name="save_checkpoint.hf_model",
            kind="extraction",
            summary="engine.save_checkpoint(directory), with hf_model in checkpoint.save_contents",
            contract=Contract(device="cpu", dtype="any", keys="any name"),
            only=_FULL,
        ),
        FrameworkPath(
            name="load_checkpoint",
            kind="rollback",
            summary="engine.save_checkpoint(directory), two steps, engine.load_checkpoint(directory)",
        ),
        FrameworkPath(
            name="load_checkpoint.fresh",
            kind="resume",
            summary="engine.save_checkpoint(directory); in another process engine.load_checkpoint(directory)",
        ),
    ),
    shims=(
        Shim(
            name="verl.plugin.platform:set_platform",
            kind="plug-in",
            reason="verl's own way to be told of a device that it does not look for",
        ),
        Shim(
            name="verl.workers.engine.fsdp.transformer_impl:device_name",
            kind="function",
            reason="the device's name, taken when the module is imported",
        ),
        Shim(
            name="verl.utils.checkpoint.fsdp_checkpoint_manager:is_cuda_available",
            kind="function",
            reason="whether to offload what is saved, asked when the module is imported",
        ),
    ),
    own_variables=("VERL_",),
)
