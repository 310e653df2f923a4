"""PyTorch's tests, read with the emulated device where they name CUDA.

``pytorch_suite.py`` has every process of a test file import this first. A test file, and what PyTorch's tests share
(the parts of ``torch.testing`` that choose their device and skip them), is loaded from where it lies with the
substitutions below. Torch itself is as it is installed.
"""

from __future__ import annotations

import os
import pathlib

from fsdp_doctor.emulated.in_place_of_cuda import SUBSTITUTIONS, install
from fsdp_doctor.emulated.library import _C

# isort: split
# Only now, since they ask at their import whether there is a device.
from torch.testing._internal import common_cuda, common_utils

_TESTS = pathlib.Path(os.environ["PYTORCH_SUITE_TESTS"])
_RANKS = int(os.environ["PYTORCH_SUITE_RANKS"])
_SHARED = ("torch.testing._internal.common_distributed", "torch.testing._internal.common_fsdp")
_SHARED_PACKAGE = "torch.testing._internal.distributed."
NANOSECONDS_OF_A_MILLISECOND = 1e6

_SUBSTITUTIONS = (
    (r"(?:torch\.cuda\.)?\bnccl\.version\(\)", "(2, 28)"),
    (r"\b(?:c10d|dist)\.is_nccl_available\b", "torch.emulated.is_available"),
    (r"\bamp_definitely_not_available\(\)", "False"),
    (r"\bTEST_CUDA\b", "TEST_PRIVATEUSE1"),
    *SUBSTITUTIONS,
    # On a class this makes a function of it, in which no runner finds a test.
    (r"@skip_if_lt_x_gpu\(\d+\)\n(?=class )", "\n"),
    # A rank that is forked from a process that has imported torch, and has not used the device, starts at once.
    (r'(get_context|start_method)\("spawn"\)', r'\1("forkserver")'),
)

_C.set_device_count(_RANKS)
_C.set_late(os.environ["PYTORCH_SUITE_LATE"] == "yes")
# The device's clock: a cycle of its _sleep is a nanosecond.
common_utils.get_cycles_per_ms = lambda *_: NANOSECONDS_OF_A_MILLISECOND
common_cuda.TEST_MULTIGPU = _RANKS > 1
common_cuda.TEST_PRIVATEUSE1 = True  # what is asked for as TEST_CUDA
install(
    lambda name, file: name in _SHARED or name.startswith(_SHARED_PACKAGE) or _TESTS in file.parents, _SUBSTITUTIONS
)
