"""Directory that a save writes to: unfinished files lie in a hidden folder of it, and get their final names at the end.

The hidden folder is in the same file system, and no program that loads models looks into it. Each rank of the save
holds a lock on a file in the folder; the system releases the lock whenever the process ends.

While the files get their names, a complete checkpoint exists in one folder at any moment, whatever stops the save.
First, the new checkpoint is complete in the hidden folder, while the former checkpoint is moved into a second hidden
folder. Then the former checkpoint is complete there, while the new checkpoint is moved into the directory. A file in
the hidden folder lists the moves. After a save that was killed, the next save moves the former checkpoint back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from fsdp_doctor.checkpoints.files import sync_directory
from fsdp_doctor.checkpoints.marker import LOCK, MARKER, PARTIAL
from fsdp_doctor.text import join_some

# Files that a load of the directory might take for a part of the new model.
WEIGHTS = re.compile(r"fsdp-doctor\.json|.*\.safetensors|.*\.(safetensors|bin)\.index\.json|pytorch_model.*\.bin")


# The list of moves, which lies among the complete new files while they get their names.
_COMMIT = "rank-all.commit"
# The end of the name of the folder with what was there before.
_ASIDE = "-former"


class SaveError(RuntimeError):
    """Error of a save that saved nothing; the message says why, and on which rank.

    The former contents of the directory are unchanged, unless the message says where they are.
    """


class SaveDirectory:
    """Directory of a save, as one rank uses it.

    ranks: the ranks that take part; the first one prepares the directory and gives the files their names.
    store: the job's store, through which the first ranks of several models see each other; None without a process
        group.
    """

    def __init__(self, path: pathlib.Path, ranks: Sequence[int], rank: int, store: dist.Store | None) -> None:
        self.path, self.partial = path, path / f"{PARTIAL}-{uuid.uuid4().hex[:12]}"
        self._ranks, self._rank, self._store = ranks, rank, store
        self._record = ""
        self._has_lock_file = False
        self._locks = contextlib.ExitStack()
        self._replaced: list[str] = []
        self._superseded: list[_Commit] = []
        # Ranks that may remove the new files: any, the first, none.
        self._removed_by: Literal["any", "first", "none"] = "any"

    def prepare(self, replaced: re.Pattern[str], *, overwrite: bool) -> None:
        """Makes the hidden folder; called by the first rank only.

        Raises SaveError for a directory that cannot be made, is in use, already has files of the same kind (unless
        ``overwrite``), or into which other ranks of this job have saved such files.

        Cleans up after a save whose ranks were killed: removes its unfinished files or, if it was giving files their
        names, moves the former checkpoint back. The complete new files of such a save are removed once this save's
        files have their names.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"the directory {self.path} cannot be made: {error.strerror}") from error
        if not self._lock(self.path / LOCK):
            raise SaveError(f"another save is writing to {self.path}: wait for it, or name another directory")
        self._has_lock_file = True
        self._locks.callback(self._remove_lock)
        self._record = f"fsdp_doctor/saved/{self.path.resolve()}/{replaced.pattern}"
        self._refuse_others_under_way()
        left_over = sorted(self.path.glob(f"{PARTIAL}-*"))
        broken_off = [_Commit.read(partial) for partial in left_over if (partial / _COMMIT).exists()]
        for commit in broken_off:
            try:
                commit.break_off()
            except OSError as error:
                raise SaveError(
                    f"the files that a save to {self.path} left cannot be moved back ({error}): {commit.describe()}"
                ) from error
        there = sorted(filter(replaced.fullmatch, os.listdir(self.path)))
        if there and not overwrite:
            raise SaveError(
                f"{self.path} already has {join_some(there, 3)}: name another directory, or use overwrite=True"
            )
        if there:
            self._refuse_files_of_others()
        self._replaced = there
        for commit in broken_off:
            # What is complete stays until something else is.
            if commit.is_done or commit.replaces:
                commit.finish()
            else:
                self._superseded.append(commit)
        kept = {folder for commit in self._superseded for folder in (commit.partial, commit.aside)}
        for partial in left_over:
            if partial not in kept and not partial.name.endswith(_ASIDE):
                shutil.rmtree(partial, ignore_errors=True)
        self.partial.mkdir()

    def _refuse_others_under_way(self) -> None:
        """Takes a lock in the job's store, for a file system without locks. Raises SaveError if other ranks hold it."""
        if self._store is None:
            return
        key, own = f"{self._record}/under way", str(list(self._ranks))
        if (ranks := self._store.compare_set(key, "", own).decode()) != own:
            raise SaveError(f"ranks {ranks} of this job are saving to {self.path}: name a directory for each model")
        self._locks.callback(self._store.delete_key, key)

    def _refuse_files_of_others(self) -> None:
        if self._store is None or not self._store.check([self._record]):
            return
        ranks, own = self._store.get(self._record).decode(), str(list(self._ranks))
        if ranks != own:
            raise SaveError(
                f"ranks {ranks} of this job have saved to {self.path}. Ranks {own} must not save there, too, because "
                "that would overwrite the files of another model, or of another pipeline stage. Use one directory for "
                "each model or stage, or remove the files first"
            )

    def join(self, partial: str) -> None:
        """Joins the save; called by each rank.

        partial: the name of the folder that the first rank made.
        """
        self.partial = self.path / partial
        if not self.partial.is_dir():
            raise SaveError(
                f"rank {self._rank} does not see the files that rank {self._ranks[0]} made in {self.path}: save to "
                "a file system that all ranks share"
            )
        if self._rank != self._ranks[0]:
            self._lock(self._get_lock(self._rank))

    def find_dead_rank(self) -> str:
        """Describes a rank whose process has ended, in one sentence; empty if all live, or if the file system has no
        locks.
        """
        for rank in self._ranks:
            with contextlib.suppress(OSError), open(self._get_lock(rank), "rb") as file:
                if rank != self._rank:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    where = _Commit.describe_in(self.partial)
                    return f"the process of rank {rank} has ended in the middle of the save{where and f': {where}'}"
        return ""

    def allocate(self, name: str, nbytes: int, header: bytes = b"") -> None:
        """Makes a file of the given size that begins with ``header``, or enlarges an existing file. Raises SaveError if
        there is no room.
        """
        fd = os.open(self.partial / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                room = os.statvfs(self.path)
                free = room.f_bavail * room.f_frsize
                raise SaveError(
                    f"{self.path} has no room for {name} of {nbytes} bytes: {free} bytes are free ({error.strerror})"
                ) from None
            os.pwrite(fd, header, 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def add(self, name: str, data: bytes) -> None:
        """Writes a small file and waits until it is on the disk."""
        with open(self.partial / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def complete(self) -> None:
        """Notes that all ranks have written all data: from now on only the first rank moves and removes files."""
        self._removed_by = "first"

    def commit(self, files: Collection[str], last: Sequence[str]) -> None:
        """Gives the files their final names; called by the first rank only.

        last: the files that get their names at the end, in order, because a checkpoint without them looks incomplete.

        Raises SaveError for an error of the file system. In this case the former checkpoint is moved back, or the
        message says where it is. New files are not removed.
        """
        self._removed_by = "none"
        commit = _Commit(self.path, self.partial, (), (*files, *last), bool(self._replaced), len(last))
        try:
            others = [name for name in os.listdir(self.partial) if name not in commit.new]
            names = (*files, *(name for name in others if not name.startswith("rank-")), *last)
            former = dict.fromkeys([*self._replaced, *(name for name in names if _is_there(self.path / name))])
            commit = replace(commit, former=tuple(sorted(former, key=_get_order)), new=names)
            self.add(f"{_COMMIT}.part", commit.to_json())
            os.rename(self.partial / f"{_COMMIT}.part", self.partial / _COMMIT)
            commit.run()
        except BaseException as error:
            with contextlib.suppress(OSError):
                commit.break_off()
            if isinstance(error, OSError):
                raise SaveError(
                    f"the new files could not be renamed to their names ({error}): {commit.describe()}"
                ) from error
            raise
        self._superseded.append(commit)
        if self._store is not None:
            self._store.set(self._record, str(list(self._ranks)))

    def clear(self) -> None:
        """Removes the former checkpoint, once all ranks know that the new files have their names."""
        for commit in self._superseded:
            commit.finish()
        self._remove_lock()

    def close(self) -> None:
        """Removes files without a final name.

        The files disappear at once, even if other ranks are still writing to them.
        """
        if self._removed_by == "any" or (self._removed_by == "first" and self._rank == self._ranks[0]):
            gone = self.partial.with_name(f"{self.partial.name}-{self._rank}")
            with contextlib.suppress(OSError):
                self.partial.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
        self._locks.close()

    def _remove_lock(self) -> None:
        """Removes the lock file. A second call does nothing, since the file may by then belong to another save.

        A lock file that is left behind is not locked, so it blocks no other save.
        """
        if self._has_lock_file:
            self._has_lock_file = False
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink()

    def _get_lock(self, rank: int) -> pathlib.Path:
        """Returns the path of a rank's lock.

        The first rank's lock is the lock of the whole directory, and is held until all ranks know how the save ended.
        """
        return self.path / LOCK if rank == self._ranks[0] else self.partial / f"rank-{rank}.lock"

    def _lock(self, path: pathlib.Path) -> bool:
        """Takes a lock. Returns True if this process now has the lock, or if the file system has no locks."""
        file = self._locks.enter_context(open(path, "wb"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it before may have removed the file meanwhile.
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:
            return True


def _get_order(name: str) -> tuple[bool, str]:
    """Returns the sort key for moving a former checkpoint, which puts the marker and index files first.

    If one of these files is absent, the checkpoint looks incomplete.
    """
    return name != MARKER and not name.endswith(".index.json"), name


@dataclass(frozen=True)
class _Commit:
    """Moves that give the new files their names.

    former: the names of existing files, in the order in which they are moved into the folder ``aside``.
    new: the names of new files, in order.
    num_last: the number of files at the end of ``new`` that are moved only when all earlier names are on the disk.
    replaces: whether the existing files are a checkpoint.
    """

    path: pathlib.Path
    partial: pathlib.Path
    former: tuple[str, ...]
    new: tuple[str, ...]
    replaces: bool
    num_last: int = 0

    def to_json(self) -> bytes:
        return json.dumps({"former": self.former, "new": self.new, "replaces": self.replaces}).encode()

    @classmethod
    def read(cls, partial: pathlib.Path) -> _Commit:
        """Reads the moves of a save whose first rank was killed. Raises SaveError if they cannot be read."""
        try:
            stated = json.loads((partial / _COMMIT).read_bytes())
            former, new, replaces = tuple(stated["former"]), tuple(stated["new"]), bool(stated["replaces"])
        except (OSError, ValueError, KeyError) as error:
            raise SaveError(f"{partial} was left by a save, and cannot be read ({error}): move it away") from error
        return cls(partial.parent, partial, former, new, replaces)

    @classmethod
    def describe_in(cls, partial: pathlib.Path) -> str:
        """Returns the sentence of ``describe`` for the moves listed in ``partial``; empty if no moves are
        listed there.
        """
        with contextlib.suppress(SaveError):
            return cls.read(partial).describe() if (partial / _COMMIT).exists() else ""
        return ""

    @property
    def aside(self) -> pathlib.Path:
        return self.partial.with_name(f"{self.partial.name}{_ASIDE}")

    @property
    def is_done(self) -> bool:
        """True once the last of the new files has its name."""
        return not _is_there(self.partial / self.new[-1])

    def run(self) -> None:
        sync_directory(self.partial)
        if self.former:
            os.mkdir(self.aside)
        for name in self.former:
            os.rename(self.path / name, self.aside / name)
        if self.former:
            sync_directory(self.aside)
        sync_directory(self.path)
        for index, name in enumerate(self.new):
            if index >= len(self.new) - self.num_last:
                sync_directory(self.path)
            os.rename(self.partial / name, self.path / name)
        sync_directory(self.path)

    def break_off(self) -> None:
        """Undoes the moves, unless all of them were made; may be called repeatedly."""
        if self.is_done:
            return
        for name in reversed(self.new):
            if not _is_there(self.partial / name):
                os.rename(self.path / name, self.partial / name)
        for name in reversed(self.former):
            if _is_there(self.aside / name):
                os.rename(self.aside / name, self.path / name)
        with contextlib.suppress(OSError):
            os.rmdir(self.aside)

    def finish(self) -> None:
        """Removes the former checkpoint; if it was moved back, removes the new files instead."""
        shutil.rmtree(self.aside, ignore_errors=True)
        if not self.aside.exists():
            shutil.rmtree(self.partial, ignore_errors=True)

    def describe(self) -> str:
        """Describes in one sentence where the new and the former checkpoint are."""
        try:
            in_partial = [_is_there(self.partial / name) for name in self.new]
            in_aside = [_is_there(self.aside / name) for name in self.former]
        except OSError as error:
            return f"the new checkpoint and the former one are in {self.path} and hidden folders of it ({error})"
        if not in_partial[-1]:
            new = f"the new checkpoint is complete in {self.path}"
        elif all(in_partial):
            new = f"the new checkpoint is complete in {self.partial}"
        else:
            new = f"the new checkpoint is partly in {self.path} and in {self.partial}"
        if not self.replaces:
            former = "there was no checkpoint before"
        elif not any(in_aside):
            former = f"the former checkpoint is unchanged in {self.path}"
        elif all(in_aside):
            former = f"the former checkpoint is complete in {self.aside}"
        else:
            former = f"the former checkpoint is partly in {self.path} and in {self.aside}"
        return f"{new}, and {former}"


def _is_there(path: pathlib.Path) -> bool:
    """Returns whether there is a file, a folder or a link. Unlike ``lexists`` it raises errors of the file system."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
