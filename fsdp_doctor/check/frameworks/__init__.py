"""The frameworks whose configurations ``check`` understands; a module or a folder each, with one `Framework`."""

from __future__ import annotations

from fsdp_doctor.check.frameworks.accelerate import ACCELERATE
from fsdp_doctor.check.frameworks.areal import AREAL
from fsdp_doctor.check.frameworks.axolotl import AXOLOTL
from fsdp_doctor.check.frameworks.framework import Framework
from fsdp_doctor.check.frameworks.hf_trainer import HF_TRAINER
from fsdp_doctor.check.frameworks.lightning import LIGHTNING
from fsdp_doctor.check.frameworks.ms_swift import MS_SWIFT
from fsdp_doctor.check.frameworks.nemo_rl import NEMO_RL
from fsdp_doctor.check.frameworks.other_engines import DEEPSPEED, MEGATRON, OPENRLHF, PLAIN_TORCH
from fsdp_doctor.check.frameworks.prime_rl import PRIME_RL
from fsdp_doctor.check.frameworks.skyrl import SKYRL
from fsdp_doctor.check.frameworks.torchtitan import TORCHTITAN
from fsdp_doctor.check.frameworks.torchtune import TORCHTUNE
from fsdp_doctor.check.frameworks.verl import VERL

# In this order: what a configuration of one has is never in one of those before it.
FRAMEWORKS: tuple[Framework, ...] = (
    *(OPENRLHF, VERL, SKYRL, AREAL, NEMO_RL, PRIME_RL, TORCHTUNE, TORCHTITAN, AXOLOTL, MS_SWIFT, LIGHTNING),
    *(ACCELERATE, HF_TRAINER, DEEPSPEED, MEGATRON, PLAIN_TORCH),
)
