"""SGLang's flattened buckets: ``update_weights_from_tensor(serialized_named_tensors, load_format="flattened_bucket")``.

Read in SGLang 0.5.23 (``weight_sync/tensor_bucket.py``, ``utils/common.py``, ``weight_updater.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.engines.packed_bucket import PackedBucket, packed_buckets
from fsdp_doctor.extract.full import BUCKET_BYTES


@dataclass(frozen=True, eq=False)
class SglangBucket:
    """One bucket. Its memory is shared with the engine: keep it until the engine has answered."""

    bucket: PackedBucket

    def serialized(self, tp_size: int = 1) -> list[bytes]:
        """``serialized_named_tensors``: an entry for each tensor-parallel rank, serialized for it alone.

        On a GPU it is a handle of the memory, on the CPU a shared file. SGLang must be installed.
        """
        flattened = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
        importlib.import_module("sglang.srt.utils.patch_torch").monkey_patch_torch_reductions()
        serializer: Any = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer
        # Where a tensor begins is for the metadata to say, so those of other dtypes can be aligned.
        metadata = [
            flattened.FlattenedTensorMetadata(
                name=entry.name,
                shape=torch.Size(entry.shape),
                dtype=getattr(torch, entry.dtype),
                start_idx=entry.start,
                end_idx=entry.end,
                numel=entry.end - entry.start,
            )
            for entry in self.bucket.index
        ]
        content = {"flattened_tensor": self.bucket.buffer, "metadata": metadata}
        return [serializer.serialize(content) for _ in range(tp_size)]


def sglang_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[SglangBucket]:
    """``full_tensors`` in buckets for SGLang. Every rank must iterate; those that send serialize.

    Device memory and errors as :func:`packed_buckets`.
    """
    for bucket in packed_buckets(tensors, bucket_bytes):
        yield SglangBucket(bucket)
