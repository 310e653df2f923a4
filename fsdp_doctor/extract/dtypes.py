"""The dtypes in which tensors are gathered and yielded."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from fsdp_doctor.extract.sources import Source, TensorSpec, specs


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class OutputDtypes:
    """The dtype in which each tensor is gathered and yielded.

    dtype: that of the floating-point tensors, None for each tensor's own. keep: patterns of names that keep their own
    all the same.
    """

    dtype: torch.dtype | None = None
    keep: Collection[str] = ()

    def of(self, spec: TensorSpec) -> torch.dtype:
        if self.dtype is None or not spec.dtype.is_floating_point:
            return spec.dtype
        is_kept = any(fnmatch.fnmatchcase(name, pattern) for name in spec.names for pattern in self.keep)
        return spec.dtype if is_kept else self.dtype

    def check(self, sources: Sequence[Source]) -> None:
        """Raises TypeError for a dtype that is not floating-point, ValueError for a pattern that is no tensor's."""
        names = [name for source in sources for spec in specs(source) for name in spec.names]
        for pattern in self.keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"keep_dtype: no parameter and no buffer is called {pattern}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, not {self.dtype}")
