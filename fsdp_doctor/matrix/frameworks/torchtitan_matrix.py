"""torchtitan: its Trainer with FSDP2, and the checkpoints that it writes."""

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

TORCHTITAN = FrameworkMatrix(
    name="torchtitan",
    title="torchtitan's Trainer on its own Qwen3 debug model, cut to two layers",
    distributions=("torchtitan", "torchdata", "spmd_types"),
    axes=(
        FrameworkAxis(
            name="offload",
            always_in_id=True,
            values={"none": "no offload", "cpu_offload": "training.enable_cpu_offload"},
        ),
        FrameworkAxis(
            name="async_mode",
            always_in_id=True,
            values={"sync": "checkpoint.async_mode: disabled", "async": "checkpoint.async_mode: async"},
        ),
        model_axis(),
    ),
    configurations=product(("none", "cpu_offload"), ("sync", "async")),
    paths=(
        FrameworkPath(
            name="save.dcp",
            kind="extraction",
            summary="checkpointer.save(step), a distributed checkpoint",
            contract=Contract(device="cpu"),
        ),
        FrameworkPath(
            name="save.hf",
            kind="extraction",
            summary="checkpointer.save(last_step=True), last_save_in_hf and last_save_model_only",
            contract=Contract(device="cpu", dtype="any", keys="any name"),
        ),
        FrameworkPath(
            name="load",
            kind="resume",
            summary="checkpointer.save(step); in another process checkpointer.load(step)",
        ),
    ),
    shims=(
        Shim(
            name="torchtitan.models.qwen3:get_attention_config",
            kind="function",
            reason="the debug model's flex attention is compiled by inductor, which knows no other device than its own",
        ),
    ),
)
