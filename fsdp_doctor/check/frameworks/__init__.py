"""The frameworks whose configurations ``check`` understands, each a module with one `Framework`."""

from __future__ import annotations

from fsdp_doctor.check.frameworks.accelerate import Accelerate
from fsdp_doctor.check.frameworks.areal import Areal
from fsdp_doctor.check.frameworks.axolotl import Axolotl
from fsdp_doctor.check.frameworks.framework import Framework
from fsdp_doctor.check.frameworks.hf_trainer import HfTrainer
from fsdp_doctor.check.frameworks.lightning import Lightning
from fsdp_doctor.check.frameworks.ms_swift import MsSwift
from fsdp_doctor.check.frameworks.nemo_rl import NemoRl
from fsdp_doctor.check.frameworks.other_engines import DeepSpeed, Megatron, OpenRlhf
from fsdp_doctor.check.frameworks.prime_rl import PrimeRl
from fsdp_doctor.check.frameworks.skyrl import SkyRl
from fsdp_doctor.check.frameworks.torchtitan import Torchtitan
from fsdp_doctor.check.frameworks.verl import Verl

# The first that recognizes a configuration reads it; no configuration of one is recognized by those before it.
FRAMEWORKS: tuple[Framework, ...] = (
    *(OpenRlhf(), Verl(), SkyRl(), Areal(), NemoRl(), PrimeRl(), Torchtitan(), Axolotl(), MsSwift(), Lightning()),
    *(Accelerate(), HfTrainer(), DeepSpeed(), Megatron()),
)
