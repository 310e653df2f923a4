"""The dtypes in which tensors are sent and yielded."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from fsdp_doctor.extract.sources import Source, TensorSpec, entries


@dataclass(frozen=True)
class OutputDtypes:
    """The dtype in which tensors are sent and yielded.

    dtype: None for each tensor's own. keep: patterns of names that keep their own all the same.
    """

    dtype: torch.dtype | None = None
    keep: Collection[str] = ()

    def of(self, entry: TensorSpec) -> torch.dtype:
        if self.dtype is None or any(fnmatch.fnmatchcase(name, p) for name in entry.names for p in self.keep):
            return entry.dtype
        return self.dtype

    def check(self, sources: Sequence[Source]) -> None:
        """Raises TypeError for a cast that loses integers, ValueError for a pattern that keeps nothing."""
        every = [entry for source in sources for entry in entries(source)]
        names = [name for entry in every for name in entry.names]
        for pattern in self.keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"keep_dtype: no parameter and no buffer is called {pattern}")
        if self.dtype is None:
            return
        if not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, not {self.dtype}")
        for entry in every:
            if not entry.dtype.is_floating_point and self.of(entry) != entry.dtype:
                raise TypeError(
                    f"{entry.names[0]} is {entry.dtype} and cannot be cast to {self.dtype}: name it in keep_dtype"
                )
