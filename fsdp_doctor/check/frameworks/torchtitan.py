"""torchtitan: the TOML of its JobConfig, which its releases up to v0.2.2 read.

Read in torchtitan at v0.2.2: config/job_config.py for what absent keys mean, distributed/utils.py (init_distributed)
for the backend, models/llama3/infra/parallelize.py for the policy, components/checkpoint.py for what is read.
"""

from __future__ import annotations

import functools

from fsdp_doctor.check.config_findings import ConfigFinding, conflict, note, unknown
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, extraction, loading, use_of

_SECTION = "parallelism"
_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
_KEYS = (
    *_DEGREES,
    *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
    *("disable_loss_parallel", "enable_async_tensor_parallel", "module_fqns_per_model_part"),
    *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
    *("pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv"),
    *("pipeline_parallel_microbatch_size", "pipeline_parallel_expert_parallel_overlap"),
    *("pipeline_parallel_split_points", "context_parallel_load_balancer", "context_parallel_rotate_method"),
    *("expert_tensor_parallel_degree", "expert_parallel_comm_backend", "enable_compiled_autograd"),
)
_OFFLOAD = "training.enable_cpu_offload"
_SHARD = f"{_SECTION}.data_parallel_shard_degree"
_CONTEXT = f"{_SECTION}.context_parallel_degree"
_TABLE = KeyTable(policy=(_OFFLOAD,), replicas=(f"{_SECTION}.data_parallel_replicate_degree",))


def _recognises(settings: Settings) -> bool:
    return _OFFLOAD in settings or bool(settings.below(_SECTION) and settings.below("training"))


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    read = functools.partial(_read, settings, given.world_size)
    return [ModelSettings(role="model", sections=(_SECTION,), keys=_KEYS, read=read)]


def _read(settings: Settings, world_size: int | None) -> ModelReading:
    offloads = settings.flag(_OFFLOAD)
    shard_row = settings.first(_SHARD)
    if settings.number(_SHARD) == 1 and (settings.number(_CONTEXT) or 1) == 1:
        sentence = "enable_cpu_offload is a setting of FSDP, and nothing is sharded with data_parallel_shard_degree=1"
        ignored = [conflict(sentence, settings.first(_OFFLOAD), shard_row)] if offloads else []
        return not_under_fsdp("model", shard_row, *ignored)
    backend = Chosen(
        "mixed" if offloads else "device-only",
        "torchtitan/distributed/utils.py: gloo beside NCCL only with enable_cpu_offload",
    )
    saves = settings.flag("checkpoint.enable", "checkpoint.enable_checkpoint")
    use = use_of(
        "model",
        "",
        {
            "strategy": Chosen("fsdp2", "torchtitan uses fully_shard only"),
            "offload": _TABLE.offload(settings, "enable_cpu_offload=false is the default"),
            "backend": backend,
            "sharding": _TABLE.sharding(settings, world_size),
        },
        lambda scenario: [
            point
            for point in (
                extraction("checkpoint", scenario, "get_model_state_dict.sharded"),
                extraction("checkpoint", scenario, "dcp"),
                loading("resume", scenario, "dcp.load.model+optimizer"),
            )
            if saves
        ],
    )
    return ModelReading(uses=(use,), findings=_other_parallelisms(settings))


def _other_parallelisms(settings: Settings) -> list[ConfigFinding]:
    rows = [settings.first(f"{_SECTION}.{degree}") for degree in _DEGREES]
    others = [row for row in rows if row and (settings.number(row.key) or 1) > 1]
    sentence = "the probe has no other parallelism beside FSDP; these settings are left out of the cases"
    return [note(sentence, *others)] if others else []


def _findings(settings: Settings) -> list[ConfigFinding]:
    """An offload that is asked for by another name."""
    return [
        unknown(f"{row.key.removeprefix('training.')!r} is not a known key of training (did you mean {_OFFLOAD}?)", row)
        for row in settings.below("training")
        if row.key != _OFFLOAD and "offload" in row.key
    ]


TORCHTITAN = Framework(
    name="torchtitan",
    read_in="v0.2.2",
    distributions=("torchtitan",),
    recognises=_recognises,
    models=_models,
    findings=_findings,
)
