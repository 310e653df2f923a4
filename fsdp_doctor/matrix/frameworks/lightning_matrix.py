"""Lightning: its two strategies for FSDP, and the Trainer's ways in and out."""

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

LIGHTNING = FrameworkMatrix(
    name="lightning",
    title="Lightning's Trainer with FSDPStrategy (FSDP1) and ModelParallelStrategy (FSDP2)",
    distributions=("lightning", "transformers"),
    axes=(
        FrameworkAxis(
            name="strategy",
            always_in_id=True,
            values={
                "fsdp": "FSDPStrategy(auto_wrap_policy=...), precision bf16-mixed",
                "model-parallel": "ModelParallelStrategy, fully_shard in configure_model",
            },
        ),
        FrameworkAxis(
            name="offload",
            always_in_id=True,
            values={"none": "no offload", "cpu_offload": "FSDPStrategy(cpu_offload=True), or CPUOffloadPolicy()"},
        ),
        FrameworkAxis(
            name="checkpoint",
            always_in_id=True,
            values={
                "full": "state_dict_type='full', save_distributed_checkpoint=False",
                "sharded": "state_dict_type='sharded', save_distributed_checkpoint=True",
            },
        ),
        model_axis("uneven", "tied", "buffers"),
    ),
    configurations=(
        *product(("fsdp", "model-parallel"), ("none", "cpu_offload"), ("full", "sharded")),
        *product(("fsdp",), ("none", "cpu_offload"), ("full", "sharded"), ("uneven", "tied")),
        *product(("model-parallel",), ("none",), ("full", "sharded"), ("uneven", "tied", "buffers")),
    ),
    paths=(
        FrameworkPath(
            name="fit", kind="prepare", summary="Trainer(strategy=...).fit(module), which wraps it and trains a step"
        ),
        FrameworkPath(
            name="save_checkpoint",
            kind="extraction",
            summary="trainer.save_checkpoint(path), its state_dict",
            contract=Contract(device="cpu", keys="any name"),
        ),
        FrameworkPath(
            name="consolidate_checkpoint",
            kind="extraction",
            summary="python -m lightning.pytorch.utilities.consolidate_checkpoint, of trainer.save_checkpoint(path)",
            contract=Contract(device="cpu", keys="any name"),
            only={"checkpoint": ("sharded",)},
        ),
        FrameworkPath(
            name="fit.ckpt_path",
            kind="resume",
            summary="trainer.save_checkpoint(path); in another process trainer.fit(module, ckpt_path=path)",
        ),
    ),
    shims=(
        Shim(
            name="lightning.pytorch.accelerators:AcceleratorRegistry",
            kind="plug-in",
            reason="its own place for devices, where the emulated one stands for cuda, which FSDPStrategy asks for",
        ),
        Shim(
            name="torch.distributed:init_process_group",
            kind="function",
            reason="Lightning asks for nccl, which is the emulated device's own backend here",
        ),
    ),
)
