"""Fingerprints of weights: proof that a receiver holds what the trainer has, without gathering either side.

keyed_sum            the sum, and what it detects; sum_kernels: the same on CUDA
block_sums           the sums of blocks of memory, by the one or the other
fingerprint_set      fingerprints as data: combined, written, read
summing              of tensors and parts of tensors
model_fingerprint    of a sharded model, and of the same model after the usual mistakes
checkpoint_files     of a checkpoint on disk
unchanged            a context that moves weights and must not change them
differences          which tensors of two fingerprints differ, and how
"""

from fsdp_doctor.weights.fingerprints.checkpoint_files import fingerprint_checkpoint
from fsdp_doctor.weights.fingerprints.differences import FingerprintDifference, FingerprintVariant, compare_fingerprints
from fsdp_doctor.weights.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    combine_fingerprints,
)
from fsdp_doctor.weights.fingerprints.model_fingerprint import RepeatedFingerprint, fingerprint, fingerprint_variants
from fsdp_doctor.weights.fingerprints.summing import (
    FingerprintSums,
    RepeatedFingerprintOfTensors,
    TensorPart,
    fingerprint_tensors,
)
from fsdp_doctor.weights.fingerprints.unchanged import WeightsChanged, unchanged

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
