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

    dtype: None for each tensor's own. keep: patterns of names that keep their own all the same.
    """

    dtype: torch.dtype | None = None
    keep: Collection[str] = ()

    def of(self, spec: TensorSpec) -> torch.dtype:
        if self.dtype is None or any(fnmatch.fnmatchcase(name, p) for name in spec.names for p in self.keep):
            return spec.dtype
        return self.dtype

    def check(self, sources: Sequence[Source]) -> None:
        """Raises TypeError for a cast that loses integers, ValueError for a pattern that keeps nothing."""
        every = [spec for source in sources for spec in specs(source)]
        names = [name for spec in every for name in spec.names]
        for pattern in self.keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"keep_dtype: no parameter and no buffer is called {pattern}")
        if self.dtype is None:
            return
        if not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, not {self.dtype}")
        for spec in every:
            if not spec.dtype.is_floating_point and self.of(spec) != spec.dtype:
                raise TypeError(
                    f"{spec.names[0]} is {spec.dtype} and cannot be cast to {self.dtype}: name it in keep_dtype"
                )
