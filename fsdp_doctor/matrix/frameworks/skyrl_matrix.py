"""SkyRL: its FSDPStrategy (FSDP2), its offload between training and sampling, and its ways in and out."""

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

CUDA_FUNCTIONS = ("current_device", "set_device", "synchronize", "empty_cache", "manual_seed_all")
_FULL = {"model": ("qwen3", "uneven", "tied")}

SKYRL = FrameworkMatrix(
    name="skyrl",
    title="SkyRL's FSDPStrategy, as its policy workers use it",
    distributions=("skyrl", "transformers", "peft"),
    axes=(
        FrameworkAxis(
            name="offload",
            always_in_id=True,
            values={
                "none": "colocate_all: false",
                "manual": "colocate_all: true: offload_to_cpu, backload_to_gpu",
                "cpu_offload": "fsdp_config.cpu_offload (FSDP2's CPUOffloadPolicy)",
            },
        ),
        model_axis("uneven", "tied", "lora"),
    ),
    configurations=product(("none", "manual", "cpu_offload"), ("", "uneven", "tied", "lora")),
    paths=(
        FrameworkPath(name="prepare", kind="prepare", summary="FSDPStrategy.prepare, backward, optimizer_step"),
        FrameworkPath(
            name="extract_weights",
            kind="extraction",
            summary="FSDPWeightExtractor(model).extract_weights(torch.bfloat16)",
            contract=Contract(dtype="any"),
            only=_FULL,
        ),
        FrameworkPath(
            name="collect_lora_params",
            kind="extraction",
            summary="collect_lora_params(model)",
            contract=Contract(device="any", weights="adapter"),
            only={"model": ("lora",)},
        ),
        FrameworkPath(
            name="layered_summon_lora_params",
            kind="extraction",
            summary="layered_summon_lora_params(model)",
            contract=Contract(device="any", weights="adapter"),
            only={"model": ("lora",)},
        ),
        FrameworkPath(
            name="save_hf_model",
            kind="extraction",
            summary="strategy.save_hf_model(model, directory)",
            contract=Contract(device="cpu", dtype="any", keys="any name"),
            only=_FULL,
        ),
        FrameworkPath(
            name="load_checkpoint.fresh",
            kind="resume",
            summary="strategy.save_checkpoint; in another process strategy.load_checkpoint",
        ),
    ),
    shims=(
        *(
            Shim(name=f"torch.cuda:{name}", kind="function", reason="SkyRL calls it outright")
            for name in CUDA_FUNCTIONS
        ),
        Shim(
            name="skyrl.backends.skyrl_train.distributed.fsdp_utils:init_device_mesh",
            kind="function",
            reason="SkyRL makes its mesh of 'cuda'",
        ),
        Shim(name="torch:Tensor.cuda", kind="function", reason="what rank 0 has loaded is brought to the device by it"),
        Shim(name="torch:empty", kind="function", reason="the others receive it in a tensor made on 'cuda'"),
        Shim(name="torch.distributed:init_process_group", kind="function", reason="its workers ask for nccl"),
        Shim(
            name="flash_attn.bert_padding",
            kind="stand-in",
            reason="imported, and not called: flash attention is not installable without CUDA",
        ),
        Shim(
            name="typing:TypedDict",
            kind="stand-in",
            reason="before Python 3.12 pydantic refuses SkyRL's configuration unless it is typing_extensions'",
        ),
    ),
)
