"""Functions that the replacements for weight syncs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.fixes.applying import AppliedFix, describe_rank, find_applied
from fsdp_doctor.fixes.job_hook import read_options, write_event
from fsdp_doctor.weights.extract import WeightInfo
from fsdp_doctor.weights.fingerprints import Fingerprints, FingerprintSums, compare_fingerprints

_MOST_SHOWN = 5


def choose_bucket_bytes(infos: Mapping[str, WeightInfo], dtype: torch.dtype | None = None) -> int:
    """Returns half of the bytes of the largest tensor, so that two buckets need no more memory than this tensor.

    infos: the tensors that are sent.
    dtype: the dtype to which the tensors are cast; None if each tensor keeps its dtype.
    """
    bytes_each = (info.shape.numel() * (dtype or info.dtype).itemsize for info in infos.values())
    return max(max(bytes_each, default=0) // 2, 1)


def list_buffers(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Lists the names that belong to buffers. A name may lack the first parts of the buffer's name in the model."""
    buffers = {strip_wrappers(name) for name, _ in model.named_buffers()}
    return [name for name in names if any(f".{buffer}".endswith(f".{name}") for buffer in buffers)]


def check_sent(
    original: Callable[..., Any], tensors: Iterable[tuple[str, torch.Tensor]], compute: Callable[[], Fingerprints]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns the tensors; under ``fix --verify``, compares the first call's tensors with the model as they pass.

    compute: a function that computes the fingerprints of the model's shards. Every rank calls it before a tensor is
        gathered.
    """
    applied = find_applied(original)
    options = read_options()
    if applied.num_calls > 1 or options is None or not options["verify"]:
        return tensors
    return _compare(applied, tensors, compute())


def _compare(
    applied: AppliedFix, tensors: Iterable[tuple[str, torch.Tensor]], expected: Fingerprints
) -> Iterator[tuple[str, torch.Tensor]]:
    sums = FingerprintSums()
    yield from sums.watch(tensors)
    sent = sums.fingerprints()
    found = compare_fingerprints(expected, sent, called=("the model", "what was sent"))
    differences = [str(difference) for difference in found[:_MOST_SHOWN]]
    facts = {"fix": applied.fix.id, "tensors": len(sent.tensors), **describe_rank()}
    write_event("verified", num_different=len(found), differences=differences, **facts)
    for difference in differences:
        applied.say_once(f"sent tensors that differ from the model's: {difference}")
