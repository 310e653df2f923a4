"""Diagnose FSDP offload and weight extraction: which combination crashes, hangs, dies, leaks or lies.

The command line is ``fsdp-doctor``. The library is :func:`full_tensors`, the extraction path that works
in every scenario of the matrix, with :func:`full_state_dict` and :func:`weights_info` beside it;
:func:`local_shards`, each rank's shards without a gather; ``engines``, both in the form that an inference engine takes;
:func:`fingerprint`, with :func:`fingerprint_tensors` and :func:`compare_fingerprints`, which proves what arrived;
:func:`load_full_tensors` and :func:`load_optimizer_state`, the way in;
:func:`examine`, which says where everything in a live model lies and what of it is trouble;
``memory.ledger``, which says what a live job holds; and
:func:`promises`, which declares what an extraction function of your own promises before
``--path module:function`` tests it.

Importing this package imports nothing else; asking it for any of these but the last imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_doctor import engines, memory
    from fsdp_doctor.examination import Examination, ModelIsBad, examine
    from fsdp_doctor.extract import (
        LocalShard,
        PlanMismatch,
        RankLeft,
        ShardPlace,
        WeightInfo,
        full_state_dict,
        full_tensors,
        local_shards,
        weights_info,
    )
    from fsdp_doctor.fingerprints import (
        FingerprintDifference,
        FingerprintError,
        Fingerprints,
        FingerprintSums,
        FingerprintVariant,
        TensorFingerprint,
        TensorPart,
        combine_fingerprints,
        compare_fingerprints,
        fingerprint,
        fingerprint_checkpoint,
        fingerprint_tensors,
        fingerprint_variants,
    )
    from fsdp_doctor.load import LoadError, LoadReport, load_full_tensors, load_optimizer_state
    from fsdp_doctor.matrix.contracts import promises

__version__ = "0.1.0"

# Submodules that are imported when they are asked for.
_ROOMS = ("engines", "memory")
_MODULE_OF = {
    "Examination": "examination",
    "FingerprintDifference": "fingerprints",
    "FingerprintError": "fingerprints",
    "FingerprintSums": "fingerprints",
    "FingerprintVariant": "fingerprints",
    "Fingerprints": "fingerprints",
    "LoadError": "load",
    "LoadReport": "load",
    "LocalShard": "extract",
    "ModelIsBad": "examination",
    "PlanMismatch": "extract",
    "RankLeft": "extract",
    "ShardPlace": "extract",
    "TensorFingerprint": "fingerprints",
    "TensorPart": "fingerprints",
    "WeightInfo": "extract",
    "combine_fingerprints": "fingerprints",
    "compare_fingerprints": "fingerprints",
    "examine": "examination",
    "fingerprint": "fingerprints",
    "fingerprint_checkpoint": "fingerprints",
    "fingerprint_tensors": "fingerprints",
    "fingerprint_variants": "fingerprints",
    "full_state_dict": "extract",
    "full_tensors": "extract",
    "load_full_tensors": "load",
    "load_optimizer_state": "load",
    "local_shards": "extract",
    "promises": "matrix.contracts",
    "weights_info": "extract",
}
__all__ = [
    "Examination",
    "FingerprintDifference",
    "FingerprintError",
    "FingerprintSums",
    "FingerprintVariant",
    "Fingerprints",
    "LoadError",
    "LoadReport",
    "LocalShard",
    "ModelIsBad",
    "PlanMismatch",
    "RankLeft",
    "ShardPlace",
    "TensorFingerprint",
    "TensorPart",
    "WeightInfo",
    "__version__",
    "combine_fingerprints",
    "compare_fingerprints",
    "engines",
    "examine",
    "fingerprint",
    "fingerprint_checkpoint",
    "fingerprint_tensors",
    "fingerprint_variants",
    "full_state_dict",
    "full_tensors",
    "load_full_tensors",
    "load_optimizer_state",
    "local_shards",
    "memory",
    "promises",
    "weights_info",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"fsdp_doctor.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fsdp_doctor.{_MODULE_OF[name]}"), name)
