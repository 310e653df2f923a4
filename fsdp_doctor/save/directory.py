"""A directory that is saved into: files under way lie in a folder of it, and get their names when all are whole.

The folder lies in the same file system, is hidden, and nothing that loads models looks into it. A rank that takes part
holds a lock on a file in it, which the system lets go of when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Collection, Sequence

from fsdp_doctor.checkpoints.files import sync_directory
from fsdp_doctor.checkpoints.marker import LOCK, MARKER, PARTIAL
from fsdp_doctor.text import join_some

# What a load of the directory might take for a part of the new model.
WEIGHTS = re.compile(r"fsdp-doctor\.json|.*\.safetensors|.*\.(safetensors|bin)\.index\.json|pytorch_model.*\.bin")


class SaveError(RuntimeError):
    """Nothing was saved; the message says why, and on which rank. What was in the directory before is as it was."""


class SaveDirectory:
    """One rank's view of it. ranks: that take part; the first prepares, and gives the files their names."""

    def __init__(self, path: pathlib.Path, ranks: Sequence[int], rank: int) -> None:
        self.path, self.partial = path, path / f"{PARTIAL}-{uuid.uuid4().hex[:12]}"
        self._ranks, self._rank = ranks, rank
        self._locks = contextlib.ExitStack()
        self._replaced: list[str] = []

    def prepare(self, replaced: re.Pattern[str], *, overwrite: bool) -> None:
        """Makes the hidden folder; on the first rank alone.

        Raises SaveError for a directory in use, and for one that has what is to be saved already.

        Removes what a save left whose ranks were killed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._lock(self.path / LOCK):
            raise SaveError(f"another save is writing to {self.path}: wait for it, or name another directory")
        self._locks.callback((self.path / LOCK).unlink, missing_ok=True)
        there = sorted(filter(replaced.fullmatch, os.listdir(self.path)))
        if there and not overwrite:
            raise SaveError(
                f"{self.path} has {join_some(there, 3)} already: name another directory, or say overwrite=True"
            )
        self._replaced = there
        for left in self.path.glob(f"{PARTIAL}-*"):
            shutil.rmtree(left, ignore_errors=True)
        self.partial.mkdir()

    def join(self, partial: str) -> None:
        """Joins the save, on each rank. partial: the name of the folder that the first rank made."""
        self.partial = self.path / partial
        if not self.partial.is_dir():
            raise SaveError(
                f"rank {self._rank} does not see what rank {self._ranks[0]} made in {self.path}: save to a file system "
                "that all ranks share"
            )
        self._lock(self._get_lock(self._rank))

    def find_dead_rank(self) -> str:
        """A sentence about a rank whose process has ended; empty if all live, or the file system has no locks."""
        for rank in self._ranks:
            with contextlib.suppress(OSError), open(self._get_lock(rank), "rb") as file:
                if rank != self._rank:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return f"the process of rank {rank} has ended in the middle of the save"
        return ""

    def allocate(self, name: str, nbytes: int, header: bytes = b"") -> None:
        """Makes a file of that size, or gives one its room. Raises SaveError where there is none."""
        fd = os.open(self.partial / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                room = os.statvfs(self.path)
                free = room.f_bavail * room.f_frsize
                raise SaveError(
                    f"{self.path} has no room for {name} of {nbytes} bytes: {free} are free ({error.strerror})"
                ) from None
            os.pwrite(fd, header, 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def add(self, name: str, data: bytes) -> None:
        """Makes a small file."""
        with open(self.partial / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, files: Collection[str], last: Sequence[str]) -> None:
        """Gives files their names; on the first rank alone. last: those without which nothing looks whole, in order."""
        others = [path.name for path in self.partial.iterdir() if path.name not in (*files, *last)]
        names = [*files, *(name for name in others if not name.startswith("rank-"))]
        for name in self._replaced:
            if name == MARKER or name.endswith(".index.json"):
                (self.path / name).unlink()
        sync_directory(self.path)
        for name in self._replaced:
            if name not in names:
                (self.path / name).unlink(missing_ok=True)
        for name in names:
            (self.partial / name).rename(self.path / name)
        for name in last:
            sync_directory(self.path)
            (self.partial / name).rename(self.path / name)
        sync_directory(self.path)
        self.close()

    def close(self) -> None:
        """Removes what has no name yet; other ranks may still be writing to it, and find all of it gone at once."""
        gone = self.partial.with_name(f"{self.partial.name}-{self._rank}")
        with contextlib.suppress(OSError):
            self.partial.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        self._locks.close()

    def _get_lock(self, rank: int) -> pathlib.Path:
        return self.partial / f"rank-{rank}.lock"

    def _lock(self, path: pathlib.Path) -> bool:
        """Whether this process has the lock now, or the file system has none."""
        file = self._locks.enter_context(open(path, "wb"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it before may have removed the file meanwhile.
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:
            return True
