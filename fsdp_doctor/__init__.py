"""Diagnoses FSDP offload and weight extraction: finds what crashes, hangs, leaks memory or gives wrong values.

The command line is ``fsdp-doctor``. The library:

:func:`full_tensors`            extracts full tensors from a sharded model, in every scenario of the matrix
:func:`full_state_dict`         extracts full tensors as one state dict
:func:`weights_info`            describes the tensors of this state dict without a gather
:func:`local_shards`            extracts each rank's own shards without a gather
:func:`load_full_tensors`       loads full tensors into a sharded model
:func:`load_optimizer_state`    loads the state of the model's optimizer
:func:`save_full_tensors`       saves a sharded model as files of the Hub; each rank writes its own rows
:func:`save_optimizer_state`    saves the state of the model's optimizer
:func:`fingerprint`             computes 128 bits for each tensor, which show whether a receiver has the same weights
:func:`unchanged`               raises if the code in its context changes the values of weights
:func:`read_hub_view`           maps each tensor of a Hub checkpoint to a part of a tensor of the model
``engines``                     gives weights in the form that an inference engine takes
:func:`examine`                 lists the devices of a live model's tensors, and finds problems
:func:`measure_memory`          measures the memory that a live job holds
:func:`promises`                declares the contract of an extraction function for ``--method module:function``

Importing this package imports nothing else. Access to any of these names except ``promises`` imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_doctor.examination.examine import Examination, ModelIsBad, examine
    from fsdp_doctor.examination.live_memory import measure_memory
    from fsdp_doctor.matrix.contracts import promises
    from fsdp_doctor.weights import engines
    from fsdp_doctor.weights.extract import (
        BuffersDiffer,
        ClosingIterator,
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
    from fsdp_doctor.weights.fingerprints import (
        FingerprintDifference,
        FingerprintError,
        Fingerprints,
        FingerprintSums,
        FingerprintVariant,
        RepeatedFingerprint,
        RepeatedFingerprintOfTensors,
        TensorFingerprint,
        TensorPart,
        WeightsChanged,
        combine_fingerprints,
        compare_fingerprints,
        fingerprint,
        fingerprint_checkpoint,
        fingerprint_tensors,
        fingerprint_variants,
        unchanged,
    )
    from fsdp_doctor.weights.fsdp.forms import UnreadableTensors
    from fsdp_doctor.weights.load import LoadError, LoadReport, load_full_tensors, load_optimizer_state
    from fsdp_doctor.weights.names import NamesError, TensorView, read_hub_view
    from fsdp_doctor.weights.save import SaveError, SaveReport, save_full_tensors, save_optimizer_state

__version__ = "0.1.0"

# By room, the public names that are imported from it when they are asked for.
_PUBLIC_NAMES = {
    "examination.examine": "Examination ModelIsBad examine",
    "examination.live_memory": "measure_memory",
    "weights.extract": "BuffersDiffer ClosingIterator LocalShard PlanMismatch RankLeft ShardPlace WeightInfo "
    "full_state_dict full_tensors local_shards weights_info",
    "weights.fingerprints": "FingerprintDifference FingerprintError FingerprintSums FingerprintVariant Fingerprints "
    "RepeatedFingerprint RepeatedFingerprintOfTensors TensorFingerprint TensorPart WeightsChanged combine_fingerprints "
    "compare_fingerprints fingerprint fingerprint_checkpoint fingerprint_tensors fingerprint_variants unchanged",
    "weights.fsdp.forms": "UnreadableTensors",
    "weights.load": "LoadError LoadReport load_full_tensors load_optimizer_state",
    "matrix.contracts": "promises",
    "weights.names": "NamesError TensorView read_hub_view",
    "weights.save": "SaveError SaveReport save_full_tensors save_optimizer_state",
}
__all__ = [
    "BuffersDiffer",
    "ClosingIterator",
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
    "NamesError",
    "PlanMismatch",
    "RankLeft",
    "RepeatedFingerprint",
    "RepeatedFingerprintOfTensors",
    "SaveError",
    "SaveReport",
    "ShardPlace",
    "TensorFingerprint",
    "TensorPart",
    "TensorView",
    "UnreadableTensors",
    "WeightInfo",
    "WeightsChanged",
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
    "measure_memory",
    "promises",
    "read_hub_view",
    "save_full_tensors",
    "save_optimizer_state",
    "unchanged",
    "weights_info",
]


def __getattr__(name: str) -> Any:
    if name == "engines":
        return importlib.import_module("fsdp_doctor.weights.engines")
    for room, names in _PUBLIC_NAMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"fsdp_doctor.{room}"), name)
    suggestion = ""
    if not name.startswith("_"):
        import difflib

        suggestion = "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(name, __all__, n=1))
    # With the name alone, Python adds no second suggestion to a traceback.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{suggestion}", name=name)


def __dir__() -> list[str]:
    """Lists the module's own names and the public names, so that an interactive Python can complete both."""
    return sorted({*globals(), *__all__})
