"""Selects the frames of a failure that belong to the code under test, not to torch, pytest, or this package."""

from __future__ import annotations

import itertools
import pathlib
import re
import sysconfig
from types import TracebackType

import fsdp_doctor

_PACKAGE = pathlib.Path(fsdp_doctor.__file__).parent
_INSTALLED = [pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_FILE = re.compile(r'\s*File "([^"]+)"')


def leave_out_libraries(error: BaseException | None) -> None:
    """Removes the frames of libraries from the tracebacks of an error and its causes.

    The last frame of each traceback is kept.
    """
    while error is not None:
        entry = error.__traceback__
        while entry is not None:
            following = _skip_libraries(entry.tb_next)
            entry.tb_next, entry = following, following
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _skip_libraries(entry: TracebackType | None) -> TracebackType | None:
    while entry is not None and entry.tb_next is not None and _is_of_a_library(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    return entry


def select_frames(text: str, *, kept: int) -> str:
    """Removes the frames of libraries from a printed traceback or stack.

    kept: the index of a frame that is always kept.
    """
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if not line.startswith("    ")]
    parts = ["\n".join(lines[begin:end]) for begin, end in itertools.pairwise([*starts, len(lines)])]
    frames = [(part, match[1]) for part in parts if (match := _FILE.match(part))]
    return "\n".join(part for part, file in frames if (part, file) == frames[kept] or not _is_of_a_library(file))


def _is_of_a_library(file: str) -> bool:
    """Returns whether the file belongs to a library.

    file: the full path of the file, or a path that begins with the library's package.
    """
    path = pathlib.Path(file)
    if file.startswith("<"):
        return True
    if path.is_absolute():
        return any(path.is_relative_to(directory) for directory in (_PACKAGE, *_INSTALLED))
    return path.parts[0] == _PACKAGE.name or any((directory / path).exists() for directory in _INSTALLED)
