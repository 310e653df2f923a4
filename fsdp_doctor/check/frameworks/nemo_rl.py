"""NeMo-RL: ``policy.dtensor_cfg`` of its YAML, where Megatron does not train.

Read in NeMo-RL at v0.2.1 to v0.7.0: models/policy/dtensor_policy_worker.py and dtensor_policy_worker_v2.py for the
backend and what is read, models/dtensor/parallelize.py and models/automodel/setup.py for the policy, which does not
pin; fsdp1_policy_worker.py until v0.2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Use, extraction, use_of
from fsdp_doctor.matrix.cases import Scenario

_DTENSOR = "policy.dtensor_cfg"
_MEGATRON = "policy.megatron_cfg.enabled"
_KEYS = (
    *("_v2", "enabled", "cpu_offload", "sequence_parallel", "activation_checkpointing", "tensor_parallel_size"),
    *(
        "context_parallel_size",
        "custom_parallel_plan",
        "lora_cfg",
        "lora",
        "env_vars",
        "automodel_kwargs",
        "moe_config",
    ),
    *(
        "data_parallel_size",
        "expert_parallel_size",
        "clear_cache_every_n_steps",
        "tensor_parallel_plan",
        "dp_replicate",
    ),
    *(
        "defer_fsdp_grad_sync",
        "checkpoint",
        "data_parallel_replicate_size",
        "moe_parallelizer",
        "pipeline_parallel_size",
    ),
)
_TABLE = KeyTable(policy=(f"{_DTENSOR}.cpu_offload",), path=("policy.model_name",))
_DEGREES = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")


@dataclass(frozen=True, kw_only=True)
class _NemoVersions(VersionRange):
    """mixed_in_v2: the second worker's group has gloo beside NCCL with the offload."""

    mixed_in_v2: bool = True


_VERSIONS = (
    _NemoVersions(label="before v0.5", versions=SpecifierSet("<0.5"), mixed_in_v2=False),
    _NemoVersions(label="since v0.5", versions=SpecifierSet(">=0.5")),
)


def _recognises(settings: Settings) -> bool:
    return bool(settings.below(_DTENSOR) or settings.below("policy.megatron_cfg")) or (
        "policy.model_name" in settings and bool(settings.below("cluster"))
    )


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    read = functools.partial(_read, settings, given)
    return [ModelSettings(role="actor", sections=(_DTENSOR,), keys=_KEYS, read=read)]


def _read(settings: Settings, given: Given) -> ModelReading:
    if settings.flag(_MEGATRON):
        return not_under_fsdp("actor", settings.first(_MEGATRON))
    enabled = settings.first(f"{_DTENSOR}.enabled")
    if enabled is None:
        raise Unreadable(
            "policy.dtensor_cfg.enabled is not in the configuration; give the file of its `defaults` beside"
        )
    if not settings.flag(f"{_DTENSOR}.enabled"):
        raise Unreadable(f"{enabled}: FSDP1 in NeMo-RL until v0.2 and refused since; neither is read")
    degrees = [settings.first(f"{_DTENSOR}.{degree}") for degree in _DEGREES]
    others = [row for row in degrees if row and (settings.number(row.key) or 1) > 1]
    sentence = "the probe has no other parallelism beside FSDP; these settings are left out of the cases"
    return ModelReading(
        uses=[_use(settings, versions) for versions in in_question(_VERSIONS, given.framework_version)],
        model=_TABLE.configured_model(settings, given.world_size),
        findings=[note(sentence, *others)] if others else [],
    )


def _use(settings: Settings, versions: _NemoVersions) -> Use:
    offload = _TABLE.offload(settings, "cpu_offload=false is the default")
    offloads = offload.value == "policy"
    second = settings.flag(f"{_DTENSOR}._v2")
    return use_of(
        "actor",
        versions.label,
        {
            "strategy": Chosen("fsdp2", "the DTensor worker uses fully_shard only"),
            "offload": offload,
            "pinning": Chosen("unpinned" if offloads else "pinned", "nemo_rl: CPUOffloadPolicy(pin_memory=False)"),
            "backend": Chosen(
                "mixed" if offloads and second and versions.mixed_in_v2 else "device-only",
                "the worker's init_process_group: gloo beside NCCL with cpu_offload, with _v2 and since v0.5",
            ),
        },
        functools.partial(_extraction_points, saves=settings.flag("checkpointing.enabled")),
    )


def _extraction_points(scenario: Scenario, saves: bool) -> list[ExtractionPoint]:
    """dtensor_params_generator, before which an offloaded model is moved to the device."""
    sync = extraction("weights for generation", scenario, "state_dict.full_tensor.to", staged=scenario.policy)
    return [sync, *([extraction("checkpoint", scenario, "get_model_state_dict.sharded")] if saves else [])]


def _world_size(settings: Settings) -> int | None:
    """All of the cluster, or what generation that has GPUs of its own leaves: on one node a part of it, else nodes.

    As algorithms/grpo.py divides it; None where the configuration does not say how many those are.
    """
    per_node, nodes = settings.number("cluster.gpus_per_node"), settings.number("cluster.num_nodes", default=1)
    if not per_node or not nodes:
        return None
    if not settings.flag("policy.generation.colocated.enabled", default=True):
        name = "gpus_per_node" if nodes == 1 else "num_nodes"
        taken = settings.number(f"policy.generation.colocated.resources.{name}")
        if taken is None:
            return None
        per_node, nodes = (per_node - taken, 1) if nodes == 1 else (per_node, nodes - taken)
    return per_node * nodes


NEMO_RL = Framework(
    name="NeMo-RL",
    read_in="v0.2.1 to v0.7.0",
    distributions=("nemo-rl",),
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
