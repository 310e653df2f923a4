"""transformers' Trainer: what its ``fsdp_config`` can be told, and its ways out and back in."""

from __future__ import annotations

from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.frameworks.accelerate_matrix import ACCELERATE_SHIMS, ACCELERATE_VARIABLES
from fsdp_doctor.matrix.frameworks.framework_matrix import (
    FrameworkAxis,
    FrameworkMatrix,
    FrameworkPath,
    Shim,
    model_axis,
    product,
)

TRAINER = FrameworkMatrix(
    name="trainer",
    title="transformers' Trainer under torchrun, with TrainingArguments(fsdp=True, fsdp_config=...)",
    distributions=("transformers", "accelerate", "peft"),
    axes=(
        FrameworkAxis(
            name="version", always_in_id=True, values={"fsdp2": '"version": 2, the default', "fsdp1": '"version": 1'}
        ),
        FrameworkAxis(
            name="offload",
            always_in_id=True,
            values={
                "none": "nothing",
                "cpu_offload": '"cpu_offload": true',
                "offload_params": '"offload_params": true, as accelerate names it',
            },
        ),
        FrameworkAxis(
            name="state_dict_type",
            always_in_id=True,
            values={
                "full": '"state_dict_type": "FULL_STATE_DICT"',
                "sharded": '"state_dict_type": "SHARDED_STATE_DICT"',
            },
        ),
        FrameworkAxis(
            name="ddp_backend",
            values={
                "own-backend": "ddp_backend not given: Trainer chooses",
                "mixed-backend": 'ddp_backend="cuda:nccl,cpu:gloo"',
            },
        ),
        model_axis("uneven", "tied", "lora"),
    ),
    configurations=(
        *product(("fsdp2", "fsdp1"), ("none",), ("full", "sharded"), ("", "uneven", "tied", "lora")),
        *product(("fsdp2", "fsdp1"), ("cpu_offload",), ("full", "sharded"), ("mixed-backend",), ("", "lora")),
        *product(("fsdp2", "fsdp1"), ("cpu_offload", "offload_params"), ("full",)),
    ),
    paths=(
        FrameworkPath(name="prepare", kind="prepare", summary="Trainer(model, args).train(), one step"),
        FrameworkPath(
            name="save_model",
            kind="extraction",
            summary="trainer.save_model(directory)",
            contract=Contract(device="cpu", keys="any name"),
            only={"model": ("qwen3", "uneven", "tied")},
        ),
        FrameworkPath(
            name="save_model.adapter",
            kind="extraction",
            summary="trainer.save_model(directory) of a model with peft's adapters",
            contract=Contract(device="cpu", weights="adapter"),
            only={"model": ("lora",)},
        ),
        FrameworkPath(
            name="resume_from_checkpoint",
            kind="resume",
            summary="a checkpoint; in another process trainer.train(resume_from_checkpoint=directory)",
        ),
    ),
    shims=(
        *ACCELERATE_SHIMS,
        Shim(
            name="transformers.training_args:is_torch_bf16_gpu_available",
            kind="function",
            reason="bf16=True is refused unless a device that transformers knows has it",
        ),
    ),
    own_variables=ACCELERATE_VARIABLES,
)
