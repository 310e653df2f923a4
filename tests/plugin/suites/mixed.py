"""Tests on ranks beside one that is not, for the options of pytest that pick tests."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest


@pytest.mark.ranks(2, device="cpu")
def test_first_fails(this_rank: Any) -> None:
    assert this_rank.world_size == 3


@pytest.mark.ranks(2, device="cpu")
def test_second_passes(tmp_path: pathlib.Path, this_rank: Any) -> None:
    print("said by a rank")
    assert (this_rank.world_size, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.ranks(2, device="cpu")
def test_third_fails(this_rank: Any) -> None:
    assert this_rank.world_size == 4


def test_plain() -> None: ...
