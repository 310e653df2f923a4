"""Frameworks that never train with FSDP: OpenRLHF, DeepSpeed and Megatron-LM.

Read in OpenRLHF at v0.11.2 (every trainer of it makes a DeepspeedStrategy), and in DeepSpeed's configuration schema.
"""

from __future__ import annotations

from typing import ClassVar

from fsdp_doctor.check.frameworks.framework import Framework, Given, ModelReading, not_under_fsdp
from fsdp_doctor.check.launch_commands import PROGRAM, SCRIPT
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Role


class _OtherEngine(Framework):
    read_in = "every version"
    why: ClassVar[str]

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        return not_under_fsdp(role, self.why)


class OpenRlhf(_OtherEngine):
    name = "OpenRLHF"
    why = "OpenRLHF trains with DeepSpeed"

    def recognizes(self, settings: Settings) -> bool:
        script = settings.text(SCRIPT)
        return script.startswith("openrlhf") or "/openrlhf/" in script


class DeepSpeed(_OtherEngine):
    name = "DeepSpeed"
    why = "DeepSpeed trains"

    def recognizes(self, settings: Settings) -> bool:
        asked = settings.first("deepspeed")
        launched = settings.text(PROGRAM) == "deepspeed" or (asked is not None and bool(asked.value))
        return bool(settings.below("zero_optimization")) or (launched and "fsdp" not in settings)


class Megatron(_OtherEngine):
    name = "Megatron-LM"
    why = "Megatron-LM trains"

    def recognizes(self, settings: Settings) -> bool:
        return any(key in settings for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"))
