"""Tests what two host tensors have to have in common to be called equal."""

from __future__ import annotations

import pytest
import torch

from fsdp_doctor.case.findings import compare

_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(0.0, -0.0), (0.0, 2e-39), (0.0, torch.nan), (3.3e38, torch.inf), (torch.inf, torch.nan), (torch.inf, -torch.inf)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_values_are_told_from_what_they_turn_into(actual: float, expected: float, dtype: torch.dtype) -> None:
    wanted = torch.tensor([1.0, expected])
    assert not compare(wanted.to(dtype), wanted)
    assert compare(torch.tensor([1.0, actual]).to(dtype), wanted)


def test_nans_of_one_dtype_are_compared_by_their_bits() -> None:
    assert not compare(_NAN[:1], _NAN[:1].clone())
    assert compare(_NAN[:1], _NAN[1:])


def test_where_the_expected_was_rounded_one_nan_is_like_any_other() -> None:
    """A GPU makes 0x7fff of a NaN, a CPU 0x7fc0 or 0xffff, depending on its instructions."""
    for payload in (0x7FFF, 0x7FC0, -1):
        rounded = torch.tensor([payload], dtype=torch.int16).view(torch.bfloat16)
        assert not compare(rounded, _NAN[:1])
    assert compare(torch.tensor([1.0], dtype=torch.bfloat16), _NAN[:1])
    assert compare(rounded, torch.tensor([1.0]))
