"""Host tensors, compared bit by bit."""

from __future__ import annotations

import torch


def compare(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """How two host tensors differ, bit by bit; empty if they do not. NaNs compare by their bits, too.

    Where the dtypes differ, ``expected`` is rounded to that of ``actual``, and then any NaN is like any other: which
    one rounding makes of a NaN depends on the device, and on a CPU on the vector instructions.
    """
    if actual.numel() != expected.numel():
        return f"{actual.numel()} elements, not {expected.numel()}"
    rounded = expected.to(actual.dtype)
    a, b = bits(actual), bits(rounded)
    if torch.equal(a, b):
        return ""
    itemsize = actual.element_size()
    differs = (a != b).view(-1, itemsize).any(dim=1)
    if actual.dtype != expected.dtype:
        differs &= ~(actual.isnan().reshape(-1) & rounded.isnan().reshape(-1))
        if not bool(differs.any()):
            return ""
    first = int(differs.nonzero()[0])
    got, want = actual.reshape(-1)[first].item(), rounded.reshape(-1)[first].item()
    return f"{int(differs.sum())} of {actual.numel()} elements differ, the first at {first}: {got!r}, not {want!r}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
