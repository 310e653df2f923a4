"""A file that one rank cannot import."""

from __future__ import annotations

import os

import pytest

if os.environ.get("RANK") == "1":
    raise ValueError("planted at the import")


@pytest.mark.ranks(2)
def test_is_in_a_file_that_raises() -> None: ...
