"""Fingerprints of weights prove that a receiver has the trainer's values, without gathering the weights on either side.

keyed_sum            the sum, and which changes it detects; sum_kernels: the same sum on CUDA
block_sums           the sums of blocks of memory, by either implementation
fingerprint_set      fingerprints as data: combined, written, read
block_fingerprints   fingerprints of blocks of memory
summing              fingerprints of tensors and of parts of tensors
model_fingerprint    the fingerprint of a sharded model, and of the model with a common mistake
checkpoint_files     the fingerprint of a checkpoint on disk
unchanged_weights    a context that raises if weights change in its body
differences          which tensors of two fingerprints differ, and how

A name is imported from its module at its first use, because the fingerprint of a file does not need torch's FSDP.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_doctor.weights.fingerprints.checkpoint_files import fingerprint_checkpoint
    from fsdp_doctor.weights.fingerprints.differences import (
        FingerprintDifference,
        FingerprintVariant,
        compare_fingerprints,
    )
    from fsdp_doctor.weights.fingerprints.fingerprint_set import (
        FingerprintError,
        Fingerprints,
        TensorFingerprint,
        combine_fingerprints,
    )
    from fsdp_doctor.weights.fingerprints.model_fingerprint import (
        RepeatedFingerprint,
        fingerprint,
        fingerprint_variants,
    )
    from fsdp_doctor.weights.fingerprints.summing import (
        FingerprintSums,
        RepeatedFingerprintOfTensors,
        TensorPart,
        fingerprint_tensors,
    )
    from fsdp_doctor.weights.fingerprints.unchanged_weights import WeightsChanged, unchanged

# By module, the public names that are imported from it when they are asked for.
_PUBLIC_NAMES = {
    "checkpoint_files": "fingerprint_checkpoint",
    "differences": "FingerprintDifference FingerprintVariant compare_fingerprints",
    "fingerprint_set": "FingerprintError Fingerprints TensorFingerprint combine_fingerprints",
    "model_fingerprint": "RepeatedFingerprint fingerprint fingerprint_variants",
    "summing": "FingerprintSums RepeatedFingerprintOfTensors TensorPart fingerprint_tensors",
    "unchanged_weights": "WeightsChanged unchanged",
}
__all__ = [
    "FingerprintDifference",
    "FingerprintError",
    "FingerprintSums",
    "FingerprintVariant",
    "Fingerprints",
    "RepeatedFingerprint",
    "RepeatedFingerprintOfTensors",
    "TensorFingerprint",
    "TensorPart",
    "WeightsChanged",
    "combine_fingerprints",
    "compare_fingerprints",
    "fingerprint",
    "fingerprint_checkpoint",
    "fingerprint_tensors",
    "fingerprint_variants",
    "unchanged",
]


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC_NAMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
