"""Diagnose FSDP offload and weight extraction: which combination crashes, hangs, dies, leaks or lies.

The command line is ``fsdp-doctor``. The library is :func:`full_tensors`, the extraction path that works
in every scenario of the matrix, with :func:`full_state_dict` and :func:`weights_info` beside it;
:func:`load_full_tensors` and :func:`load_optimizer_state`, the way in;
:func:`examine`, which says where everything in a live model lies and what of it is trouble; and
:func:`promises`, which declares what an extraction function of your own promises before
``--path module:function`` tests it.

Importing this package does not import torch; asking it for any of these but the last does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_doctor.matrix.contracts import promises

if TYPE_CHECKING:
    from fsdp_doctor.examination import Examination, ModelIsBad, examine
    from fsdp_doctor.extract import (
        PlanMismatch,
        RankLeft,
        WeightInfo,
        full_state_dict,
        full_tensors,
        weights_info,
    )
    from fsdp_doctor.load import LoadError, LoadReport, load_full_tensors, load_optimizer_state

__version__ = "0.1.0"

_OF_EXTRACT = ("PlanMismatch", "RankLeft", "WeightInfo", "full_state_dict", "full_tensors", "weights_info")
_OF_LOAD = ("LoadError", "LoadReport", "load_full_tensors", "load_optimizer_state")
_OF_LIVE = ("Examination", "ModelIsBad", "examine")
__all__ = [
    "Examination",
    "LoadError",
    "LoadReport",
    "ModelIsBad",
    "PlanMismatch",
    "RankLeft",
    "WeightInfo",
    "__version__",
    "examine",
    "full_state_dict",
    "full_tensors",
    "load_full_tensors",
    "load_optimizer_state",
    "promises",
    "weights_info",
]


def __getattr__(name: str) -> Any:
    if name in _OF_EXTRACT:
        from fsdp_doctor import extract

        return getattr(extract, name)
    if name in _OF_LOAD:
        from fsdp_doctor import load

        return getattr(load, name)
    if name in _OF_LIVE:
        from fsdp_doctor import examination

        return getattr(examination, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
