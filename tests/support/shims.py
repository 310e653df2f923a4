"""Code that must run before a script of a framework's users, so that the script runs on the emulated device."""

from __future__ import annotations

# Scripts do not name the emulated device. They use the accelerator that torch has, or that their framework finds.
ON_THE_EMULATED_DEVICE = """
import os, torch
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
"""
_WITH_SHIMS = """
from fsdp_doctor.frameworks.adapter import Shims
from fsdp_doctor.frameworks.framework_worker import find_adapter
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
shims = Shims({framework!r}, read_matrix({framework!r}).shims)
find_adapter({framework!r}).prepare_emulated_device(shims)
"""


def prepare_for(framework: str) -> str:
    """Returns source code that makes a framework find the emulated device."""
    return ON_THE_EMULATED_DEVICE + _WITH_SHIMS.format(framework=framework)
