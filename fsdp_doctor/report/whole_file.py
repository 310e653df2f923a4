"""A file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib


def replace_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes beside ``path`` and renames, so that a reader never sees half a file.

    Raises OSError, and then what was there stays.
    """
    beside = path.with_name(path.name + ".new")
    if path.exists() and not path.is_file():
        # A device or a pipe would be replaced like a file.
        raise OSError(errno.EINVAL, "it is there, and no regular file")
    try:
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
