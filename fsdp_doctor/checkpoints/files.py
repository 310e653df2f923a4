"""Reads a file of a checkpoint in chunks with pread: nothing is memory-mapped or cached."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import NamedTuple

# Small enough to stay in the processor's cache while it is summed and scanned.
CHUNK_BYTES = 1 << 19


class BadFile(Exception):
    """Error for a damaged or unexpected file. ``what`` is the predicate of a sentence about the file or its tensor."""

    def __init__(self, what: str, tensor: str = "") -> None:
        super().__init__(f"{tensor} {what}" if tensor else what)
        self.what, self.tensor = what, tensor

    def describe(self, path: object) -> str:
        """Makes a sentence about the file at ``path``."""
        return f"{path}: {self.tensor} {self.what}" if self.tensor else f"{path} {self.what}"


class NotRead(BadFile):
    """Error for valid content of a kind that this program does not read."""


class Extent(NamedTuple):
    """Range of a file. If ``is_hole`` is true, nothing was ever written there, and it reads as zeros."""

    begin: int
    end: int
    is_hole: bool


_GIT_LFS = b"version https://git-lfs.github.com/spec/"


class OpenFile:
    """Regular file that is open for reading.

    Raises OSError if it cannot be opened, and NotRead if it is not a regular file: a pipe might block forever.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self.size, self.version = status.st_size, get_version(status)
        # Searching for holes takes time proportional to the file, so it is done only if there may be one.
        self._may_have_holes = status.st_blocks * 512 < status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise NotRead("is not a regular file")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes from ``offset`` on. Thread-safe. Raises BadFile if the file ends first."""
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise BadFile(f"became shorter while it was read: it ends at byte {offset}")
            offset, into = offset + count, into[count:]

    def read(self, offset: int, length: int) -> bytes:
        """Reads exactly ``length`` bytes. Raises BadFile if the file ends first."""
        if offset < 0 or offset + length > self.size:
            raise BadFile(f"is truncated: it has {self.size} bytes, but {offset + length} are expected")
        data = os.pread(self._fd, length, offset)
        while len(data) < length:
            rest = bytearray(length - len(data))
            self.read_into(offset + len(data), memoryview(rest))
            data += rest
        return data

    def check_content(self) -> None:
        """Raises BadFile for a pointer of Git LFS: the text in the place of a file that was not fetched."""
        if os.pread(self._fd, len(_GIT_LFS), 0) == _GIT_LFS:
            raise BadFile("is only a pointer of Git LFS, not the file: `git lfs pull`, or a download, fetches the file")

    def find_extents(self, begin: int, end: int) -> Iterator[Extent]:
        """Divides a range into holes and written parts; without holes if the file system does not report them."""
        if not self._may_have_holes:
            yield Extent(begin, end, False)
            return
        while begin < end:
            data = _seek(self._fd, begin, os.SEEK_DATA, end)
            if begin < data:
                yield Extent(begin, min(data, end), True)
            if data < end:
                hole = min(_seek(self._fd, data, os.SEEK_HOLE, end), end)
                yield Extent(data, hole, False)
                data = hole
            begin = data

    def has_changed(self) -> bool:
        """Returns whether the file was modified, or replaced by another file of the same name.

        A removed file counts as unchanged.
        """
        states = [os.fstat(self._fd)]
        with contextlib.suppress(FileNotFoundError):
            states.append(os.stat(self.path))
        return any(get_version(state) != self.version for state in states)


def _seek(fd: int, offset: int, whence: int, end: int) -> int:
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data up to the end of the file
            return end
        return offset if whence == os.SEEK_DATA else end


def make_path(place: str | os.PathLike[str]) -> pathlib.Path:
    """Makes a path. Raises ValueError for an empty text, which pathlib would take for the current directory."""
    if not os.fspath(place):
        raise ValueError('the path is empty: name a directory or a file, "." for the current directory')
    return pathlib.Path(place)


def get_version(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def sync_directory(directory: pathlib.Path) -> None:
    """Flushes the directory's entries to disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
