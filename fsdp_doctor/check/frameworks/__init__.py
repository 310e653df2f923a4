"""Frameworks whose configurations ``check`` understands. Each framework has a class, and most have a TOML table."""

from __future__ import annotations

from typing import ClassVar

from fsdp_doctor.check.framework import Framework, FrameworkFacts, ModelReading, report_not_under_fsdp
from fsdp_doctor.check.frameworks.areal import Areal
from fsdp_doctor.check.frameworks.fsdp_config import Accelerate, Axolotl, HfTrainer, MsSwift
from fsdp_doctor.check.frameworks.lightning import Lightning
from fsdp_doctor.check.frameworks.nemo_rl import NemoRl
from fsdp_doctor.check.frameworks.prime_rl import PrimeRl
from fsdp_doctor.check.frameworks.skyrl import SkyRl
from fsdp_doctor.check.frameworks.torchtitan import Torchtitan
from fsdp_doctor.check.frameworks.verl import Verl
from fsdp_doctor.check.launch_commands import PROGRAM, SCRIPT
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Role


class _OtherEngine(Framework):
    """Framework that never trains with FSDP. In OpenRLHF v0.11.2, for example, every trainer uses DeepspeedStrategy."""

    why: ClassVar[str]

    def read(self, role: Role) -> ModelReading:
        return report_not_under_fsdp(role, self.why)


class _OpenRlhf(_OtherEngine):
    facts = FrameworkFacts(name="OpenRLHF", read_in="every version")
    why = "OpenRLHF trains with DeepSpeed"

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        script = settings.read_text(SCRIPT)
        return script.startswith("openrlhf") or "/openrlhf/" in script


class _DeepSpeed(_OtherEngine):
    facts = FrameworkFacts(name="DeepSpeed", read_in="every version")
    why = "DeepSpeed trains"

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        row = settings.find_first("deepspeed")
        is_launched = settings.read_text(PROGRAM) == "deepspeed" or (row is not None and bool(row.value))
        return bool(settings.list_below("zero_optimization")) or (is_launched and "fsdp" not in settings)


class _Megatron(_OtherEngine):
    facts = FrameworkFacts(name="Megatron-LM", read_in="every version")
    why = "Megatron-LM trains"

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return "tensor_model_parallel_size" in settings or "pipeline_model_parallel_size" in settings


# The first class that recognizes a configuration reads it. The order ensures that no earlier class recognizes the
# configuration of a later class.
FRAMEWORKS: tuple[type[Framework], ...] = (
    *(_OpenRlhf, Verl, SkyRl, Areal, NemoRl, PrimeRl, Torchtitan, Axolotl, MsSwift, Lightning),
    *(Accelerate, HfTrainer, _DeepSpeed, _Megatron),
)


def find_framework(name: str) -> type[Framework]:
    """Finds a framework by the name that is stored in a CheckResult."""
    return next(kind for kind in FRAMEWORKS if kind.facts.name == name)
