"""A checkpoint of any format as Hugging Face files: streamed, verified as it is read and as it was written."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import pathlib
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import CHUNK_BYTES, BadFile
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.reading import read_checkpoint
from fsdp_doctor.checkpoints.record import SavedCheckpoint, SavedModel, SavedPiece, SavedTensor, choose_model
from fsdp_doctor.checkpoints.scanning import Scans
from fsdp_doctor.checkpoints.verification import Verification, judge

LARGEST_FILE = 5_000_000_000
# What else a directory of the Hub has; copied from the checkpoint where it is there.
_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja"),
)


class ConversionError(Exception):
    """Nothing was converted; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """verification: of the source; nothing was written unless it is sound. names: that were changed, old to new."""

    verification: Verification
    files: list[str]
    num_bytes: int
    names: dict[str, str]


def convert_to_hub(
    source: pathlib.Path,
    target: pathlib.Path,
    *,
    overwrite: bool = False,
    largest_file: int = LARGEST_FILE,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the model in ``source`` to a new directory of safetensors files with an index, which transformers reads.

    The dtypes are those that were saved; a head that shares the memory of the embedding, and is tied to it by
    config.json, is left out. The source is verified as it is read, once; if it is not sound, nothing is left. Then what
    was written is read and compared. The directory gets its name at the end, so that an interruption leaves
    none of that name; what it leaves is removed by the next conversion. Host memory: a few MiB. Runs no pickle.

    overwrite: a directory of this name is replaced. largest_file: bytes. progress: as of ``verify``.

    Raises ConversionError for what cannot be converted, OSError.
    """
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists; name another directory, or say --overwrite")
    source.stat()
    checkpoint = read_checkpoint(source)
    if any(symptom.trouble.value.severity != "warning" for symptom in checkpoint.symptoms):
        return Conversion(judge(checkpoint, source, progress=progress)[0], [], 0, {})
    try:
        model = choose_model(checkpoint)
        _leave_out_tied_head(model, checkpoint)
        plan = _Plan.make(model, largest_file)
    except BadFile as error:
        raise ConversionError(error.describe(source)) from None
    if not model.tensors:
        raise ConversionError(f"{source} holds no tensors by name")
    with _make_partial_directory(target) as directory, contextlib.closing(_Writer(directory, plan)) as writer:
        found, scans = judge(checkpoint, source, progress=progress, sink=writer.write)
        if found.answer != "sound":
            return Conversion(found, [], 0, {})
        writer.compare(scans)
        writer.finish()
        for name in _BESIDE:
            for state in model.states:
                places = (state.directory, f"{state.directory}/huggingface", "huggingface", ".")
                file = next((f for f in (checkpoint.root / place / name for place in places) if f.is_file()), None)
                if file is not None:
                    shutil.copyfile(file, directory / name)
        _rename(directory, target)
    return Conversion(found, [file.name for file in plan.files], plan.num_bytes, plan.names)


@dataclass(slots=True)
class _Route:
    """The bytes of a piece in its file, and where they go: in runs of ``run`` bytes.

    target: the offset of the whole tensor in the file ``number``. outer: lengths and distances in bytes of the dims
    before those that a run covers.
    """

    begin: int
    nbytes: int
    number: int
    target: int
    run: int
    outer: list[tuple[int, int]]

    def divide(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the piece, offset in the target file, length) of the runs between two offsets in the piece."""
        while first < end:
            index, inside = divmod(first, self.run)
            place = self.target + inside
            for length, distance in reversed(self.outer):
                index, at = divmod(index, length)
                place += at * distance
            length = min(self.run - inside, end - first)
            yield first, place, length
            first += length


@dataclass(slots=True)
class _PlannedFile:
    name: str
    header: bytes
    nbytes: int


@dataclass(slots=True)
class _Plan:
    """Which tensor lies where. routes: by the file that they read, in its order."""

    files: list[_PlannedFile] = field(default_factory=list)
    index: bytes | None = None
    routes: dict[str, list[_Route]] = field(default_factory=lambda: defaultdict(list))
    names: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    @classmethod
    def make(cls, model: SavedModel, largest_file: int) -> _Plan:
        """Raises BadFile for a tensor that safetensors cannot have, or that is stored with gaps."""
        plan = cls()
        new_names = {name: strip_wrappers(name) for name in model.tensors}
        if len(set(new_names.values())) < len(new_names):
            raise BadFile("has names that differ in a wrapper's prefix alone")
        plan.names = {old: new for old, new in new_names.items() if old != new}
        # safetensors has no gaps, so that falling sizes of elements keep all of them aligned.
        tensors = sorted(model.tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
        plan.num_bytes = sum(tensor.numel * tensor.itemsize for _, tensor in tensors)
        groups: list[list[tuple[str, SavedTensor]]] = [[]]
        held = 0
        for name, tensor in tensors:
            nbytes = tensor.numel * tensor.itemsize
            if groups[-1] and held + nbytes > largest_file:
                groups.append([])
                held = 0
            groups[-1].append((new_names[name], tensor))
            held += nbytes
        for number, group in enumerate(groups):
            of = f"-{number + 1:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            plan._add_file(f"model{of}.safetensors", group)
        if len(groups) > 1:
            weight_map = {name: file.name for file, group in zip(plan.files, groups, strict=True) for name, _ in group}
            index = {"metadata": {"total_size": plan.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            plan.index = json.dumps(index, indent=2).encode()
        for routes in plan.routes.values():
            routes.sort(key=lambda route: route.begin)
        return plan

    def _add_file(self, name: str, tensors: list[tuple[str, SavedTensor]]) -> None:
        entries: dict[str, dict[str, object]] = {}
        begins: dict[str, int] = {}
        at = 0
        for key, tensor in tensors:
            if not (code := DTYPES[tensor.dtype].code):
                raise BadFile(f"is {tensor.dtype}, which safetensors does not have", key)
            end = at + tensor.numel * tensor.itemsize
            entries[key] = {"dtype": code, "shape": tensor.shape, "data_offsets": [at, end]}
            begins[key], at = at, end
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        for key, tensor in tensors:
            begin = len(header) + begins[key]
            for piece in {(p.offsets, p.shape): p for p in reversed(tensor.pieces) if p.numel}.values():
                if piece.begin < 0 or not piece.is_contiguous:
                    raise BadFile("is stored with gaps between its elements, or packed, which is not converted", key)
                self.routes[piece.file].append(_plan_route(tensor, piece, len(self.files), begin))
        self.files.append(_PlannedFile(name, header, len(header) + at))


def _leave_out_tied_head(model: SavedModel, checkpoint: SavedCheckpoint) -> None:
    head = model.tensors.get("lm_head.weight")
    ties = any(
        checkpoint.find_setting(state.directory, "config.json").get("tie_word_embeddings") for state in model.states
    )
    if head is not None and ties and any(t.pieces == head.pieces for t in model.tensors.values() if t is not head):
        del model.tensors["lm_head.weight"]


def _plan_route(tensor: SavedTensor, piece: SavedPiece, number: int, begin: int) -> _Route:
    distances = [math.prod(tensor.shape[dim + 1 :]) * tensor.itemsize for dim in range(len(tensor.shape))]
    target = begin + sum(offset * distance for offset, distance in zip(piece.offsets, distances, strict=True))
    split = len(piece.shape)
    while split and (split == len(piece.shape) or piece.shape[split] == tensor.shape[split]):
        split -= 1
    run = math.prod(piece.shape[split:]) * tensor.itemsize
    outer = list(zip(piece.shape[:split], distances[:split], strict=True))
    return _Route(piece.begin, piece.numel * tensor.itemsize, number, target, run, outer)


class _Writer:
    """The files of a plan, in a directory."""

    def __init__(self, directory: pathlib.Path, plan: _Plan) -> None:
        self._directory, self._plan = directory, plan
        self._fds: list[int] = []
        # The files are read in order: routes before it are done.
        self._next = dict.fromkeys(plan.routes, 0)
        room = os.statvfs(directory)
        if (free := room.f_bavail * room.f_frsize) < plan.num_bytes:
            raise ConversionError(f"{directory.parent} has {free} bytes left, and {plan.num_bytes} are needed")
        try:
            for file in plan.files:
                self._fds.append(
                    os.open(directory / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                )
                os.ftruncate(self._fds[-1], file.nbytes)
                self._write(len(self._fds) - 1, file.header, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def write(self, path: str, offset: int, chunk: bytes) -> None:
        """Bytes of a file of the source, of which each is given once, in order."""
        routes = self._plan.routes.get(path, ())
        end, view = offset + len(chunk), memoryview(chunk)
        first = self._next.get(path, 0)
        while first < len(routes) and routes[first].begin + routes[first].nbytes <= offset:
            first += 1
        if path in self._next:
            self._next[path] = first
        for route in itertools.takewhile(lambda route: route.begin < end, itertools.islice(routes, first, None)):
            inside = max(offset, route.begin) - route.begin, min(end, route.begin + route.nbytes) - route.begin
            for at, place, length in route.divide(*inside):
                begin = route.begin + at - offset
                self._write(route.number, view[begin : begin + length], place)

    def _write(self, number: int, data: bytes | memoryview, place: int) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._fds[number], view, place)
            except OSError as error:
                file = self._directory / self._plan.files[number].name
                raise ConversionError(f"cannot write {file}: {error.strerror or error}") from None
            view, place = view[count:], place + count

    def compare(self, scans: Scans) -> None:
        """Raises ConversionError if what was written is not what was read."""
        for path, routes in self._plan.routes.items():
            for route in routes:
                crc = 0
                for _, place, length in route.divide(0, route.nbytes):
                    for begin in range(place, place + length, CHUNK_BYTES):
                        data = os.pread(self._fds[route.number], min(CHUNK_BYTES, place + length - begin), begin)
                        crc = zlib.crc32(data, crc)
                if crc != scans.spans[path, route.begin, route.nbytes].crc:
                    name = self._plan.files[route.number].name
                    raise ConversionError(f"{name} did not keep what was written to it, from byte {route.target} on")

    def finish(self) -> None:
        """Makes all of it last."""
        for fd in self._fds:
            os.fsync(fd)
        if self._plan.index is not None:
            (self._directory / "model.safetensors.index.json").write_bytes(self._plan.index)
        _sync_directory(self._directory)


@contextlib.contextmanager
def _make_partial_directory(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new directory beside the target; removed at the end, unless it was renamed. One that was left is replaced."""
    directory = target.parent / f".{target.name}.partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(f"another conversion is writing {target}") from None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.unlink(lock.name)


def _rename(directory: pathlib.Path, target: pathlib.Path) -> None:
    old = target.parent / f".{target.name}.old"
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    directory.rename(target)
    _sync_directory(target.parent)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def _sync_directory(directory: pathlib.Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
