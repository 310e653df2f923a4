"""What PyTorch's tests ask of the machine, answered for the emulated device.

``tests/emulated/pytorch_suite.py`` has every process of a test file import it first. It changes what torch's *tests*
take for granted (the names of ``torch.testing._internal`` that choose a device and skip); of torch itself nothing.
"""

from __future__ import annotations

import os
import unittest
from typing import Any

from torch.testing._internal import common_distributed, common_fsdp

import fsdp_doctor.emulated  # noqa: F401, which registers the device

_DEVICE = "emulated"
_RANKS = int(os.environ["EMULATED_SUITE_RANKS"])


def _enough(wanted: int) -> bool:
    return wanted <= _RANKS


def _skip_if_fewer(wanted: int, **_: Any) -> Any:
    return unittest.skipIf(not _enough(wanted), f"needs {wanted} devices")


def _no_condition(*_: Any, **__: Any) -> Any:
    return lambda test: test


common_distributed.at_least_x_gpu = _enough
common_distributed.skip_if_lt_x_gpu = _skip_if_fewer
for condition in ("requires_nccl", "requires_nccl_version", "requires_accelerator_dist_backend"):
    if hasattr(common_distributed, condition):
        setattr(common_distributed, condition, _no_condition)

common_fsdp.DEVICE_TYPE = _DEVICE
common_fsdp.DEVICE_COUNT = _RANKS
common_fsdp.DISTRIBUTED_BACKEND = "cpu:gloo,emulated:emulated"
# An accelerator that is not CUDA: each rank sets its device, and a delay is one of the host.
common_fsdp.TEST_XPU = True
if hasattr(common_fsdp, "FSDPTestContinuous"):
    common_fsdp.FSDPTestContinuous.world_size = _RANKS
