"""Whether every rank has the same files: told by what they say of their tensors, and by samples of the values.

A node with a copy of its own may have an older one, whose names, shapes and sizes are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fsdp_doctor.load.safetensors_files import FileTensor

# One read takes as much from a disk; over a network each may take a millisecond. Of another training step hardly a
# tensor has the same 4 KiB.
_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 128


def digests(tensors: Mapping[str, FileTensor]) -> tuple[str, str]:
    """Of all names, shapes and dtypes; and of the bytes in the middle of each tensor, or of 128 at most."""
    names = sorted(tensors)
    described = hashlib.blake2b(digest_size=8)
    for name in names:
        described.update(f"{name}: {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
    sampled = hashlib.blake2b(digest_size=8)
    stride = -(-len(names) // _MOST_SAMPLES) or 1
    for name in names[::stride]:
        sampled.update(_middle(tensors[name]))
    return described.hexdigest(), sampled.hexdigest()


def _middle(tensor: FileTensor) -> bytes:
    nbytes = tensor.end - tensor.begin
    sample = bytearray(min(nbytes, _SAMPLE_BYTES))
    tensor.file.read(tensor.begin + (nbytes - len(sample)) // 2, memoryview(sample))
    return bytes(sample)
