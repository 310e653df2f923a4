"""The frameworks whose configurations ``check`` understands; a module or a folder each, with one `Framework`."""

from __future__ import annotations

from fsdp_doctor.check.frameworks.accelerate import ACCELERATE
from fsdp_doctor.check.frameworks.framework import Framework
from fsdp_doctor.check.frameworks.hf_trainer import HF_TRAINER
from fsdp_doctor.check.frameworks.torchtitan import TORCHTITAN
from fsdp_doctor.check.frameworks.verl import VERL

# In this order: what a configuration of one has is never in one of those before it.
FRAMEWORKS: tuple[Framework, ...] = (VERL, TORCHTITAN, ACCELERATE, HF_TRAINER)
