"""Compares host tensors bit by bit, and summarizes the findings of a check as problems."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fsdp_doctor.text import join_some
from fsdp_doctor.verdict.records import Problem, ProblemKind

_SHOWN = 3


class Findings:
    """Findings about named tensors, summarized as one problem for each kind, in the order in which the kinds first
    came.
    """

    def __init__(self) -> None:
        self._names: dict[ProblemKind, dict[str, list[str]]] = {}

    def note(self, kind: ProblemKind, what: str, name: str) -> None:
        self._names.setdefault(kind, {}).setdefault(what, []).append(name)

    def list_problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(
                kind=kind, detail="; ".join(f"{what}: {join_first_names(names)}" for what, names in findings.items())
            )
            for kind, findings in self._names.items()
        )


def join_first_names(names: Collection[str]) -> str:
    return join_some(names, _SHOWN)


def compare(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Describes how two host tensors differ, bit by bit; empty if they are equal. NaNs are compared by their bits, too.

    If the dtypes differ, ``expected`` is rounded to the dtype of ``actual``, and all NaNs count as equal, because the
    NaN that rounding makes depends on the device, and on a CPU on the vector instructions.
    """
    if actual.numel() != expected.numel():
        return f"{actual.numel()} elements, not {expected.numel()}"
    rounded = expected.to(actual.dtype)
    a, b = view_as_bits(actual), view_as_bits(rounded)
    if torch.equal(a, b):
        return ""
    differs = (a != b).view(-1, actual.element_size()).any(dim=1)
    if actual.dtype != expected.dtype:
        differs &= ~(actual.isnan().reshape(-1) & rounded.isnan().reshape(-1))
        if not bool(differs.any()):
            return ""
    return describe_first_difference(differs, actual, rounded)


def describe_first_difference(differs: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Describes how many elements differ, and the first of them.

    differs: a flat mask of the elements that differ, at least one.
    """
    first = int(differs.nonzero()[0])
    got, want = actual.reshape(-1)[first].item(), expected.reshape(-1)[first].item()
    return f"{int(differs.sum())} of {actual.numel()} elements differ, the first at {first}: {got!r}, not {want!r}"


def view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
