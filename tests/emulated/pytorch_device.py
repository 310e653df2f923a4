"""PyTorch's tests, read with the emulated device where they name CUDA.

``pytorch_run.py`` has every process of a test file import this first. A test file, and what PyTorch's tests share
(the parts of ``torch.testing`` that choose their device and skip them), is loaded from where it lies with the
substitutions below. Torch itself is as it is installed.
"""

from __future__ import annotations

import importlib.machinery
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

_TESTS = pathlib.Path(os.environ["PYTORCH_SUITE_TESTS"])
_RANKS = int(os.environ["PYTORCH_SUITE_RANKS"])
_SHARED = ("torch.testing._internal.common_distributed", "torch.testing._internal.common_fsdp")
_SHARED_PACKAGE = "torch.testing._internal.distributed."
NANOSECONDS_OF_A_MILLISECOND = 1e6

_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?:torch\.cuda\.)?\bnccl\.version\(\)", "(2, 28)"),
        (r"\b(?:c10d|dist)\.is_nccl_available\b", "torch.emulated.is_available"),
        (r"\bamp_definitely_not_available\(\)", "False"),
        (r"\btorch\.cuda\b(?!\.(?:nccl|amp))", "torch.emulated"),
        (r"\bTEST_CUDA\b", "TEST_PRIVATEUSE1"),
        (r"\.cuda\(", ".emulated("),
        (r"\bis_cuda\b", "is_emulated"),
        (r"(?<![\w.])cuda(?!\w)", "emulated"),
        (r"""(?<=["':])nccl(?=["',])""", "emulated"),
        # On a class this makes a function of it, in which no runner finds a test.
        (r"@skip_if_lt_x_gpu\(\d+\)\n(?=class )", "\n"),
        # A rank that is forked from a process that has imported torch, and has not used the device, starts at once.
        (r'(get_context|start_method)\("spawn"\)', r'\1("forkserver")'),
    )
)


def register() -> None:
    """The device as the suite wants it. Torch calls it at its import, as for every backend that is installed."""
    from fsdp_doctor.emulated.library import _C

    _C.set_device_count(_RANKS)
    _C.set_late(os.environ["PYTORCH_SUITE_LATE"] == "yes")


def on_device(source: str) -> str:
    """``source`` with the emulated device in place of CUDA; every line keeps its number."""
    for pattern, replacement in _SUBSTITUTIONS:
        source = pattern.sub(replacement, source)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = pathlib.Path(self.path).read_text()
        return compile(on_device(source), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        from torch.testing._internal import common_cuda, common_utils

        # The device's clock: a cycle of its _sleep is a nanosecond.
        common_utils.get_cycles_per_ms = lambda *_: NANOSECONDS_OF_A_MILLISECOND
        common_cuda.TEST_MULTIGPU = _RANKS > 1
        common_cuda.TEST_PRIVATEUSE1 = True  # what is asked for as TEST_CUDA
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("torch.") and not (name in _SHARED or name.startswith(_SHARED_PACKAGE)):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        if not (name.startswith("torch.") or _TESTS in pathlib.Path(spec.origin).parents):
            return None
        spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder)
