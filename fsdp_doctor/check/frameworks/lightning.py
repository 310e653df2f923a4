"""Lightning: FSDPStrategy and ModelParallelStrategy in LightningCLI's YAML.

Sources read in Lightning 2.0.0, 2.1.0, 2.2.0 and 2.6.5: pytorch/strategies/fsdp.py for default arguments and
checkpoints; model_parallel.py; fabric/utilities/distributed.py for the backend, which is only NCCL on CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_doctor.check.findings import ConfiguredModel, note
from fsdp_doctor.check.framework import (
    FsdpFramework,
    Keys,
    ModelReading,
    VersionRange,
    choose_backend,
    load_facts,
    report_not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, OffloadChoice, Role, make_extraction_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Offload, Sharding, Strategy
from fsdp_doctor.matrix.cases import Scenario

_STRATEGY = ("trainer.strategy", "trainer.strategy.class_path", "strategy.class_path")
_MODEL_PARALLEL = "ModelParallelStrategy"
# Names of registered strategies, and whether each offloads.
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
_NCCL_ALONE = "Lightning's default is only NCCL"


class _Versions(VersionRange, frozen=True, kw_only=True):
    """Range of Lightning versions; ``use_orig_params`` is the default of FSDPStrategy's argument."""

    use_orig_params: bool


class Lightning(FsdpFramework[_Versions]):
    facts = load_facts("lightning", _Versions)

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        row = settings.find_first(*_STRATEGY)
        names = (*_FSDP_NAMES, "ddp", "ddp_find_unused_parameters_true")
        return row is not None and (row.name == "class_path" or str(row.value) in names)

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        devices = settings.count("trainer.devices")
        return devices and devices * (settings.count("trainer.num_nodes") or 1)

    def read(self, role: Role) -> ModelReading:
        row = self.settings.find_first(*_STRATEGY)
        if self._name == _MODEL_PARALLEL:
            sentence = (
                "the fully_shard call in configure_model is not here: it is not known whether it has an offload policy"
            )
            return self.read_role(role, [note(sentence, row)], [_Versions(use_orig_params=True)])
        if self._name in _FSDP_NAMES:
            return self.read_role(role)
        if _OTHER_NAMES.fullmatch(self._name):
            return report_not_under_fsdp(role, row)
        raise Unreadable(f"{row} does not say which strategy is used")

    def read_model(self, role: Role) -> ConfiguredModel:
        """Returns an empty model, since the model is defined in the script."""
        return ConfiguredModel()

    def choose_axes(self, role: Role, versions: _Versions) -> dict[AxisName, Chosen]:
        if self._name == _MODEL_PARALLEL:
            return {
                "strategy": Chosen(Strategy.FSDP2, f"{_MODEL_PARALLEL} lets the script call fully_shard"),
                "offload": Chosen(Offload()),
                "backend": Chosen(Backend.DEVICE_ONLY, _NCCL_ALONE),
            }
        orig, cpu_offload = (
            self.settings.find_first(*_name_keys("use_orig_params")),
            self.settings.find_first(*_name_keys("cpu_offload")),
        )
        is_flat = not self.settings.read_flag(*_name_keys("use_orig_params"), default=versions.use_orig_params)
        by_name = self.settings.find_first(*_STRATEGY) if _FSDP_NAMES[self._name] and cpu_offload is None else None
        offload = OffloadChoice(
            policy=by_name or self.settings.find_first_true(*_name_keys("cpu_offload")),
            default=cpu_offload or "cpu_offload=None is the default",
        )
        row = self.settings.find_first(*_name_keys("sharding_strategy"))
        sharding = _SHARDING.get(str(row.value).rpartition(".")[2].upper() if row else "")
        return {
            "strategy": Chosen(
                Strategy.FSDP1 if is_flat else Strategy.FSDP1_ORIG,
                orig or f"use_orig_params={not is_flat} is the default".lower(),
            ),
            "offload": offload.chosen,
            "backend": choose_backend(self.settings.find_first(*_name_keys("process_group_backend")), _NCCL_ALONE),
            "sharding": Chosen(sharding, row) if sharding else Chosen(Sharding.FULL),
        }

    def list_extractions(self, role: Role, versions: _Versions, scenario: Scenario) -> Iterator[ExtractionPoint]:
        if self._name == _MODEL_PARALLEL:
            saves_shards = self.settings.read_flag(*_name_keys("save_distributed_checkpoint"), default=True)
            method = "get_model_state_dict.sharded+cpu" if saves_shards else "get_model_state_dict.full+cpu"
        else:
            saves_shards = self.settings.read_word(*_name_keys("state_dict_type"), default="full") == "sharded"
            method = "sharded_state_dict" if saves_shards else "full_state_dict.rank0+cpu"
        yield make_extraction_point("checkpoint", scenario, method)

    @property
    def _name(self) -> str:
        return self.settings.read_text(*_STRATEGY).rpartition(".")[2]


def _name_keys(name: str) -> Keys:
    return f"trainer.strategy.init_args.{name}", f"strategy.init_args.{name}"
