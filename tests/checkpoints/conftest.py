"""The checkpoints that all tests of this directory read."""

from __future__ import annotations

import pathlib

import pytest
from support import saved_checkpoints


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with one for each format. Tests damage copies."""
    directory = tmp_path_factory.mktemp("originals")
    saved_checkpoints.save_all(directory)
    return directory
