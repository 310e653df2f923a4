"""torchtitan: the TOML of its JobConfig, which its releases up to v0.2.2 read.

Read in torchtitan at v0.2.2: config/job_config.py for what absent keys mean, distributed/utils.py (init_distributed)
for the backend, models/llama3/infra/parallelize.py for the policy, components/checkpoint.py for what is read.
"""

from __future__ import annotations

from fsdp_doctor.check import common
from fsdp_doctor.check.frameworks.accelerate import reasons_of
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import (
    ConfigFinding,
    ExtractionPoint,
    Given,
    Reading,
    Use,
    because,
    conflict,
    note,
)
from fsdp_doctor.matrix.cases import Case, Scenario

NAME = "torchtitan"
KNOWN_BY = "training.enable_cpu_offload or parallelism.*, in TOML"

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
_SHARD = "parallelism.data_parallel_shard_degree"
_REPLICATE = "parallelism.data_parallel_replicate_degree"


def recognises(settings: Settings) -> bool:
    return _OFFLOAD in settings or bool(settings.below("parallelism") and settings.below("training"))


def read(settings: Settings, given: Given) -> Reading:
    found = common.unknown_keys(settings, "parallelism", _KEYS)
    found += [
        ConfigFinding(kind="unknown", sentence=f"training has no such key; near it: {_OFFLOAD}", settings=(str(row),))
        for row in settings.below("training")
        if row.key != _OFFLOAD and "offload" in row.key
    ]
    try:
        use, more = _use(settings, given)
    except Unreadable as error:
        use, finding = common.unreadable("model", error)
        more = [finding]
    return Reading(uses=(use,), findings=(*found, *more))


def _use(settings: Settings, given: Given) -> tuple[Use, list[ConfigFinding]]:
    offload = settings.flag(_OFFLOAD)
    shard = settings.number(_SHARD, default=-1)
    replicate = settings.number(_REPLICATE, default=1) or 1
    if shard == 1 and (settings.number("parallelism.context_parallel_degree", default=1) or 1) == 1:
        ignored = [
            conflict("enable_cpu_offload is FSDP's, and no rank shards", *map(settings.first, (_OFFLOAD, _SHARD)))
        ]
        use = Use(role="model", why_not=f"not under FSDP: {settings.first(_SHARD)}")
        return use, ignored if offload else []
    scenario = Scenario(
        strategy="fsdp2",
        offload="policy" if offload else "none",
        staging="unstaged",
        backend="mixed" if offload else "device-only",
        sharding="hsdp" if replicate > 1 else "full",
    )
    whys = {
        "strategy": "torchtitan has fully_shard alone",
        "offload": because(settings.first(_OFFLOAD), "enable_cpu_offload=false is the default"),
        "backend": "torchtitan/distributed/utils.py: gloo beside NCCL with enable_cpu_offload alone",
        "sharding": str(settings.first(_REPLICATE)) if replicate > 1 else "",
    }
    saves = settings.flag("checkpoint.enable", "checkpoint.enable_checkpoint")
    paths = ("get_model_state_dict.sharded", "dcp") if saves else ()
    use = Use(
        role="model",
        scenario=scenario,
        reasons=reasons_of(scenario, whys),
        extractions=tuple(ExtractionPoint(purpose="checkpoint", case=Case(scenario, path)) for path in paths),
    )
    return use, _beside(settings)


def _beside(settings: Settings) -> list[ConfigFinding]:
    """The parallelisms that the matrix does not have."""
    rows = [settings.first(f"parallelism.{degree}") for degree in _DEGREES]
    others = [row for row in rows if row and (settings.number(row.key) or 1) > 1]
    return (
        [note("the matrix has no other parallelism beside FSDP; the cases leave these out", *others)] if others else []
    )
