"""Fingerprints of weights: proof that a receiver holds what the trainer has, without gathering either side.

keyed_sum            the sum, and what it detects
indexed_blocks       memory and the places of its elements; sum_kernels: the sum on CUDA
fingerprint_set      fingerprints as data: combined, written, read
summing              of tensors and parts of tensors
model_fingerprint    of a sharded model
checkpoint_files     of a checkpoint on disk
differences          which tensors of two fingerprints differ, and how
variants             what a fingerprint would be after a mistake, to tell how
"""

from fsdp_doctor.fingerprints.checkpoint_files import fingerprint_checkpoint
from fsdp_doctor.fingerprints.differences import (
    FingerprintDifference,
    FingerprintVariant,
    compare_fingerprints,
)
from fsdp_doctor.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    combine_fingerprints,
)
from fsdp_doctor.fingerprints.model_fingerprint import fingerprint
from fsdp_doctor.fingerprints.summing import FingerprintSums, TensorPart, fingerprint_tensors
from fsdp_doctor.fingerprints.variants import fingerprint_variants

__all__ = [
    "FingerprintDifference",
    "FingerprintError",
    "FingerprintSums",
    "FingerprintVariant",
    "Fingerprints",
    "TensorFingerprint",
    "TensorPart",
    "combine_fingerprints",
    "compare_fingerprints",
    "fingerprint",
    "fingerprint_checkpoint",
    "fingerprint_tensors",
    "fingerprint_variants",
]
