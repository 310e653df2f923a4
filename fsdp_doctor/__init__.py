"""Diagnose FSDP offload and weight extraction: which combination crashes, hangs, dies, leaks or lies.

The command line is ``fsdp-doctor``. The library is :func:`full_tensors`, the extraction path
that works in every scenario of the matrix, and :func:`promises`, which declares what an
extraction function of your own promises before ``--path module:function`` tests it.

Importing this package does not import torch; asking it for ``full_tensors`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_doctor.paths import promises

if TYPE_CHECKING:
    from fsdp_doctor.extract import full_tensors

__version__ = "0.1.0"

__all__ = ["__version__", "full_tensors", "promises"]


def __getattr__(name: str) -> Any:
    if name == "full_tensors":
        from fsdp_doctor.extract import full_tensors

        return full_tensors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
