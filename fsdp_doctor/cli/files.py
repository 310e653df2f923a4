"""The files that a command writes: checked before the work, written after it."""

from __future__ import annotations

import io
import pathlib
import sys
from collections.abc import Mapping

from fsdp_doctor.errors import DoctorFault, UsageError


def check_writable(file: pathlib.Path) -> None:
    """Raises UsageError where the file could not be written later. Leaves the file system as it was."""
    existed = file.exists()
    try:
        with open(file, "a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def check_distinct(files: Mapping[str, pathlib.Path]) -> None:
    """Raises UsageError where two options name one file. ``files``: by the option's name."""
    if len({file.resolve() for file in files.values()}) < len(files):
        raise UsageError(f"two of {', '.join(files)} name the same file")


def write(output: pathlib.Path | None, text: str) -> None:
    """Writes to the file, or to stdout where there is none."""
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text)
        return
    check_writable(output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorFault(f"cannot write {output}: {error.strerror or error}") from None
