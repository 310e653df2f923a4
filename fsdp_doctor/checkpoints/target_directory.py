"""The directory that a conversion writes: created under a temporary name, and renamed at the end.

An existing directory is replaced only if a conversion wrote every file in it, as a record in the directory shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec

from fsdp_doctor.checkpoints.files import BadFile, OpenFile, sync_directory
from fsdp_doctor.text import join_some

RECORD = "fsdp-doctor-conversion.json"
_LONGEST_RECORD = 100_000_000
_Identity: TypeAlias = tuple[int, int]


class ConversionError(Exception):
    """Error of a conversion that left no output. The message is one sentence that gives the reason."""


class ConversionRecord(msgspec.Struct):
    """Record of a conversion: the size in bytes and the modification time in ns of each file, by relative path.

    It is first written without files, so that a directory left by a killed conversion can be recognized.
    """

    files: dict[str, tuple[int, int]]
    format: Literal["fsdp-doctor conversion"] = "fsdp-doctor conversion"


def check_target(target: pathlib.Path, source: pathlib.Path, files: Iterable[pathlib.Path], *, overwrite: bool) -> None:
    """Checks that a conversion may write to the target. Raises ConversionError if not.

    A target that exists is accepted only if it may be overwritten and a conversion wrote all of it. The target must not
    be, contain, or lie inside anything that is read. ``files`` are the source's files, some of which may be links to
    other directories.
    """
    for place in (target, _name_partial(target), _name_old(target)):
        if any(_lies_in(each, place) for each in (source, *_list_directories(files))):
            raise ConversionError(f"{place} is or contains {source}, and would be removed; name another directory")
        if _lies_in(place, source):
            raise ConversionError(f"{place} is inside the source {source}; name a directory outside the source")
    if _is_there(target):
        if not overwrite:
            raise ConversionError(f"{target} exists; name another directory, or use --overwrite")
        _check_written_by_conversion(target)


@contextlib.contextmanager
def make_partial_directory(target: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """Creates a new directory next to the target, and removes it at the end unless it was renamed to the target.

    Also removes the leftovers of a killed conversion, and restores an older target that the killed conversion had set
    aside.

    Raises ConversionError if another conversion is writing the target, or if a restored target may not be overwritten.
    """
    directory, old = _name_partial(target), _name_old(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(f"another conversion is writing {target}") from None
        try:
            _remove_leftover(directory, is_partial=True)
            if _is_there(old) and not _is_there(target):
                _check_written_by_conversion(old)
                old.rename(target)
                if not overwrite:
                    raise ConversionError(
                        f"{target} exists: it was restored from the copy that a killed conversion had set aside"
                    )
            _remove_leftover(old)
            directory.mkdir()
            _write_record(directory, ConversionRecord({}))
            yield directory
        finally:
            if (directory / RECORD).is_file():
                shutil.rmtree(directory)
            os.unlink(lock.name)


def give_name(directory: pathlib.Path, target: pathlib.Path) -> None:
    """Renames the complete directory to the target. Raises ConversionError if the old target has gained or changed
    files.
    """
    files = {str(path.relative_to(directory)): _get_version(path) for path in _list_files(directory)}
    _write_record(directory, ConversionRecord({path: version for path, version in files.items() if path != RECORD}))
    sync_directory(directory)
    old = _name_old(target)
    if _is_there(target):
        _check_written_by_conversion(target)
        target.rename(old)
    directory.rename(target)
    sync_directory(target.parent)
    _remove_leftover(old)


def _name_partial(target: pathlib.Path) -> pathlib.Path:
    return target.parent / f".{target.name}.partial"


def _name_old(target: pathlib.Path) -> pathlib.Path:
    return target.parent / f".{target.name}.old"


def _is_there(path: pathlib.Path) -> bool:
    """Returns whether the path exists, even as a broken link. Raises OSError if that cannot be determined."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _identify(path: str | pathlib.Path) -> _Identity | None:
    """Identifies a file independently of its name; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lies_in(inner: pathlib.Path, outer: pathlib.Path) -> bool:
    """Returns whether ``inner`` is ``outer`` or lies below it, following links."""
    if (whose := _identify(outer)) is None:
        return False
    real = pathlib.Path(os.path.realpath(inner))
    return any(_identify(each) == whose for each in (real, *real.parents))


def _list_directories(files: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Lists the directories that contain the files, with links resolved."""
    return {pathlib.Path(os.path.realpath(file)).parent for file in files}


def _list_files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Lists the files and links below a directory, but no directories."""
    for here, below, names in os.walk(directory):
        links = [name for name in below if os.path.islink(os.path.join(here, name))]
        yield from (pathlib.Path(here, name) for name in (*names, *links))


def _get_version(path: pathlib.Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns


def _write_record(directory: pathlib.Path, record: ConversionRecord) -> None:
    with open(directory / RECORD, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _read_record(directory: pathlib.Path) -> ConversionRecord | None:
    try:
        with OpenFile(directory / RECORD) as file:
            return msgspec.json.decode(file.read(0, min(file.size, _LONGEST_RECORD)), type=ConversionRecord)
    except (OSError, BadFile, msgspec.MsgspecError):
        return None


def _check_written_by_conversion(target: pathlib.Path) -> None:
    """Raises ConversionError unless the target is a directory that is empty or unchanged since a conversion
    wrote it.
    """
    if target.is_symlink() or not target.is_dir():
        raise ConversionError(f"{target} is not a directory, and is not replaced; name another directory")
    record = _read_record(target)
    known = record.files if record is not None else {}
    others = sorted(
        str(path.relative_to(target))
        for path in _list_files(target)
        if path != target / RECORD and known.get(str(path.relative_to(target))) != _get_version(path)
    )
    if others:
        raise ConversionError(
            f"{target} contains files that no conversion wrote, or that were changed since, and is not replaced: "
            f"{join_some(others)}; remove it yourself, or name another directory"
        )


def _remove_leftover(path: pathlib.Path, *, is_partial: bool = False) -> None:
    """Removes the leftovers of a conversion. Raises ConversionError if someone else may have written them."""
    if not _is_there(path):
        return
    if not is_partial or path.is_symlink() or not path.is_dir() or _read_record(path) is None:
        _check_written_by_conversion(path)
    shutil.rmtree(path)
