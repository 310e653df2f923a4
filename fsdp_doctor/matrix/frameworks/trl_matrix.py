"""TRL: its trainers under FSDP, their sync to vLLM, and what they save."""

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
from fsdp_doctor.matrix.frameworks.trainer_matrix import TRAINER

STAND_IN = "vllm:LLM, trl.generation.vllm_client:VLLMClient"
_FULL = {"model": ("qwen3", "uneven", "tied")}

TRL = FrameworkMatrix(
    name="trl",
    title="TRL's SFTTrainer, with the VLLMGeneration by which its online trainers give vLLM their weights",
    distributions=("trl", "transformers", "accelerate", "peft"),
    axes=(
        FrameworkAxis(
            name="version",
            always_in_id=True,
            values={
                "fsdp2": '"version": 2',
                "fsdp1": '"version": 1, "use_orig_params": false',
                "fsdp1-orig": '"version": 1, "use_orig_params": true',
            },
        ),
        FrameworkAxis(
            name="offload", always_in_id=True, values={"none": "nothing", "cpu_offload": '"cpu_offload": true'}
        ),
        model_axis("uneven", "tied", "lora"),
    ),
    configurations=(
        *product(("fsdp2", "fsdp1", "fsdp1-orig"), ("none", "cpu_offload")),
        *product(("fsdp2", "fsdp1-orig"), ("none", "cpu_offload"), ("uneven", "tied", "lora")),
    ),
    paths=(
        FrameworkPath(name="prepare", kind="prepare", summary="SFTTrainer(model, args).train(), one step"),
        FrameworkPath(
            name="sync_weights.colocate",
            kind="extraction",
            summary="VLLMGeneration(mode='colocate').sync_weights(), what vLLM's load_weights is given",
            contract=Contract(dtype="any", keys="parameters"),
            only=_FULL,
        ),
        FrameworkPath(
            name="sync_weights.server",
            kind="extraction",
            summary="VLLMGeneration(mode='server').sync_weights(), what the client's update_named_params is given",
            contract=Contract(dtype="any", keys="parameters", ranks="rank0"),
            only=_FULL,
        ),
        FrameworkPath(
            name="sync_weights.merged",
            kind="extraction",
            summary="VLLMGeneration(mode='colocate').sync_weights() of a model with peft's adapters",
            contract=Contract(dtype="any", keys="parameters", weights="merged"),
            only={"model": ("lora",)},
        ),
        FrameworkPath(
            name="save_model",
            kind="extraction",
            summary="trainer.save_model(directory)",
            contract=Contract(device="cpu", keys="any name"),
            only=_FULL,
        ),
    ),
    shims=(
        *TRAINER.shims,
        Shim(
            name=STAND_IN,
            kind="stand-in",
            reason="recorded at the method by which they are given weights; no engine runs, on CUDA neither",
        ),
    ),
    own_variables=TRAINER.own_variables,
)
