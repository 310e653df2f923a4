"""Any receiver: buckets of bytes with an index, and the fingerprints of what was sent, to check what is held by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fsdp_doctor


def sync(model: nn.Module, send: Callable[[Any], object] | None, bucket_bytes: int = 512 << 20) -> None:
    """After a training step, on every rank. send: how rank 0 sends an object or a tensor; None on the other ranks."""
    sums = fsdp_doctor.FingerprintSums()
    tensors = fsdp_doctor.full_tensors(model, dtype=torch.bfloat16, names="auto")
    for bucket in fsdp_doctor.engines.packed_buckets(sums.watch(tensors), bucket_bytes):
        if send is not None:
            send([dataclasses.asdict(one) for one in bucket.index])
            send(bucket.buffer)
    if send is not None:
        send(sums.fingerprints().to_json())


def receive(held: dict[str, torch.Tensor], next_message: Callable[[], Any]) -> list[str]:
    """The receiver's side: what differs after it."""
    while not isinstance(message := next_message(), str):
        index = [fsdp_doctor.engines.PackedTensor(**one) for one in message]
        for name, tensor in fsdp_doctor.engines.read_bucket(next_message(), index):
            held[name].copy_(tensor)
    sent = fsdp_doctor.Fingerprints.from_json(message)
    return list(map(str, fsdp_doctor.compare_fingerprints(sent, fsdp_doctor.fingerprint_tensors(held))))
