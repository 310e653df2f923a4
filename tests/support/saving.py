"""Makes directories that all ranks of a check save into."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from support.ranks import of_all_ranks, this_rank, together


@contextlib.contextmanager
def new_directory() -> Iterator[pathlib.Path]:
    """Yields a directory for all ranks, which does not exist yet."""
    (name,) = {*of_all_ranks(tempfile.mkdtemp() if this_rank() == 0 else "")} - {""}
    yield pathlib.Path(name) / "saved"
    together()
    if this_rank() == 0:
        shutil.rmtree(name)
