"""Fingerprints of weights: proof that a receiver holds what the trainer has, without gathering either side.

keyed_sum            the sum, and what it detects
indexed_blocks       memory and the places of its elements; sum_kernels: the sum on CUDA
fingerprint_set      fingerprints as data: combined, written, read
summing              of tensors and parts of tensors
model_fingerprint    of a sharded model
"""

from fsdp_doctor.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    combine_fingerprints,
)
from fsdp_doctor.fingerprints.model_fingerprint import fingerprint
from fsdp_doctor.fingerprints.summing import FingerprintSums, TensorPart, fingerprint_tensors

__all__ = [
    "FingerprintError",
    "FingerprintSums",
    "Fingerprints",
    "TensorFingerprint",
    "TensorPart",
    "combine_fingerprints",
    "fingerprint",
    "fingerprint_tensors",
]
