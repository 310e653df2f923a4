"""Lightning: FSDPStrategy and ModelParallelStrategy, in LightningCLI's YAML.

Read in Lightning at 2.0.0, 2.1.0, 2.2.0 and 2.6.5: pytorch/strategies/fsdp.py for absent arguments and for what a
checkpoint reads, model_parallel.py, and fabric/utilities/distributed.py for the backend (NCCL alone on CUDA).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_doctor.check.findings import note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    VersionRange,
    get_if_true,
    matching,
    names_gloo,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, OffloadChoice, Role, Use, extraction, use_of
from fsdp_doctor.matrix.axes import Sharding

_ARGUMENTS = ("trainer.strategy.init_args", "strategy.init_args")
_STRATEGY = ("trainer.strategy", "trainer.strategy.class_path", "strategy.class_path")
# The names of registered strategies, and whether each offloads.
_FSDP_NAMES = {
    "fsdp": False,
    "fsdp_cpu_offload": True,
    "fsdp_native": False,
    "fsdp_native_full_shard_offload": True,
    "FSDPStrategy": False,
}
_OTHER_NAMES = re.compile(r"[A-Za-z_]*(?:ddp|DDP|DeepSpeed|deepspeed|auto|Single)\w*")
_SHARDING: dict[str, Sharding] = {
    "HYBRID_SHARD": Sharding.HSDP,
    "_HYBRID_SHARD_ZERO2": Sharding.HSDP,
    "NO_SHARD": Sharding.SIZE1,
}
_NCCL_ALONE = "Lightning's default is NCCL alone"


@dataclass(frozen=True)
class _Versions(VersionRange):
    """use_orig_params: where it is not set."""

    use_orig_params: bool


_VERSIONS = (_Versions("before 2.1", "<2.1", False), _Versions("since 2.1", ">=2.1", True))


def _keys(name: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in _ARGUMENTS)


class Lightning(Framework):
    name = "Lightning"
    read_in = "2.0.0 to 2.6.5"
    distributions = ("lightning", "pytorch-lightning")

    def recognizes(self, settings: Settings) -> bool:
        row = settings.first(*_STRATEGY)
        names = (*_FSDP_NAMES, "ddp", "ddp_find_unused_parameters_true")
        return row is not None and (row.name == "class_path" or str(row.value) in names)

    def world_size(self, settings: Settings) -> int | None:
        devices = settings.count("trainer.devices")
        return devices and devices * (settings.count("trainer.num_nodes") or 1)

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        row = settings.first(*_STRATEGY)
        name = settings.text(*_STRATEGY).rpartition(".")[2]
        if name == "ModelParallelStrategy":
            sentence = "the fully_shard that configure_model calls is not here: whether it has a policy is not known"
            return ModelReading(uses=(_read_model_parallel(settings),), findings=[note(sentence, row)])
        if name in _FSDP_NAMES and row is not None:
            ranges = matching(_VERSIONS, given.framework_version)
            return ModelReading(uses=[_read_use(settings, row, _FSDP_NAMES[name], versions) for versions in ranges])
        if _OTHER_NAMES.fullmatch(name):
            return not_under_fsdp(role, row)
        raise Unreadable(f"{row} does not say which strategy it is")


def _read_use(settings: Settings, strategy: Setting, name_offloads: bool, versions: _Versions) -> Use:
    orig, backend = settings.first(*_keys("use_orig_params")), settings.first(*_keys("process_group_backend"))
    is_flat = not settings.flag(*_keys("use_orig_params"), default=versions.use_orig_params)
    cpu_offload = settings.first(*_keys("cpu_offload"))
    offload = OffloadChoice(
        policy=strategy if name_offloads and cpu_offload is None else get_if_true(settings, *_keys("cpu_offload")),
        default=cpu_offload or "cpu_offload=None is the default",
    )
    path = settings.word(*_keys("state_dict_type"), default="full")
    row = settings.first(*_keys("sharding_strategy"))
    sharding = _SHARDING.get(settings.text(*_keys("sharding_strategy")).rpartition(".")[2].upper(), "full")
    return use_of(
        "model",
        versions.label,
        {
            "strategy": Chosen(
                "fsdp1" if is_flat else "fsdp1-orig", orig or f"use_orig_params={not is_flat} is the default".lower()
            ),
            "offload": offload.chosen,
            "backend": Chosen(
                "mixed" if backend and names_gloo(str(backend.value)) else "device-only", backend or _NCCL_ALONE
            ),
            "sharding": Chosen(sharding, row if sharding != "full" else None),
        },
        lambda scenario: [
            extraction(
                "checkpoint", scenario, "sharded_state_dict" if path == "sharded" else "full_state_dict.rank0+cpu"
            )
        ],
    )


def _read_model_parallel(settings: Settings) -> Use:
    """FSDP2, which the script's own configure_model asks for."""
    saves_shards = settings.flag(*_keys("save_distributed_checkpoint"), default=True)
    path = "get_model_state_dict.sharded+cpu" if saves_shards else "get_model_state_dict.full+cpu"
    return use_of(
        "model",
        "",
        {
            "strategy": Chosen("fsdp2", "ModelParallelStrategy has the script call fully_shard"),
            "offload": Chosen("none"),
            "backend": Chosen("device-only", _NCCL_ALONE),
        },
        lambda scenario: [extraction("checkpoint", scenario, path)],
    )
