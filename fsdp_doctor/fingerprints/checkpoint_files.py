"""The fingerprint of a checkpoint on disk, which is read 64 MiB at a time, however large it is."""

from __future__ import annotations

import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping

import torch

from fsdp_doctor.errors import first_line
from fsdp_doctor.fingerprints.fingerprint_set import FingerprintError, Fingerprints
from fsdp_doctor.fingerprints.keyed_sum import range_block
from fsdp_doctor.fingerprints.summing import FingerprintSums, require_dense, unsummed
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.safetensors_files import FileTensor, open_files, read_index

_CHUNK_BYTES = 64 << 20
_DCP_BATCH_BYTES = 256 << 20
_NESTED = ("state_dict", "model", "module")


def fingerprint_checkpoint(path: pathlib.Path | str, *, dtype: torch.dtype | None = None) -> Fingerprints:
    """Fingerprints a safetensors file, a file of ``torch.save``, a directory of either, or a distributed checkpoint.

    A directory may have an index or not. Host memory: 64 MiB and a cast of them; for a distributed checkpoint 256 MiB
    or its largest tensor. Files of ``torch.save`` are mapped, not read, and must be in the zip format.

    dtype: floating-point tensors are cast to it, as :func:`fingerprint` does with the same argument.

    Raises FingerprintError if it is no checkpoint, LoadError (RuntimeError) for a safetensors file that is damaged or
    changes while it is read, OSError.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FingerprintError(f"{path} does not exist")
    sums = FingerprintSums()
    if path.is_dir() and (path / ".metadata").exists():
        _add_distributed(sums, path, dtype)
    elif (files := _torch_files(path)) is not None:
        _add_torch_files(sums, files, dtype)
    else:
        _add_safetensors(sums, path, dtype)
    return sums.fingerprints()


def _add(
    sums: FingerprintSums, name: str, tensor: torch.Tensor, shape: torch.Size, first: int, dtype: torch.dtype | None
) -> None:
    """Adds the elements of a tensor of that shape from ``first`` on: 1-D, on the host."""
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    blocks = [range_block(0, tensor, first)]
    sums.add_blocks(name, unsummed(tensor.dtype, shape, blocks), blocks)
    sums.flush()


def _add_safetensors(sums: FingerprintSums, path: pathlib.Path, dtype: torch.dtype | None) -> None:
    files, tensors = open_files(path)
    buffer = bytearray(_CHUNK_BYTES)
    try:
        for name, tensor in tensors.items():
            for first, chunk in _file_chunks(tensor, buffer):
                _add(sums, name, chunk, tensor.shape, first, dtype)
        for file in files:
            file.check_unchanged()
    finally:
        for file in files:
            file.close()


def _file_chunks(tensor: FileTensor, buffer: bytearray) -> Iterator[tuple[int, torch.Tensor]]:
    numel, itemsize = tensor.shape.numel(), tensor.dtype.itemsize
    step = len(buffer) // itemsize
    memory, values = memoryview(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
    for first in range(0, max(numel, 1), step):
        part = values[: min(step, numel - first) * itemsize]
        if part.numel():
            tensor.file.read(tensor.begin + first * itemsize, memory[: part.numel()])
        yield first, part.view(tensor.dtype)


def _torch_files(path: pathlib.Path) -> list[pathlib.Path] | None:
    """The files of ``torch.save`` in the checkpoint; None if it is of safetensors."""
    if path.is_file():
        return None if path.suffix == ".safetensors" else [path]
    if any(path.glob("*.safetensors")):
        return None
    try:
        index = read_index(path, "bin")
    except LoadError as error:
        raise FingerprintError(str(error)) from None
    if index:
        return [path / name for name in sorted(set(index.values()))]
    files = sorted(file for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    return files or None


def _add_torch_files(sums: FingerprintSums, files: list[pathlib.Path], dtype: torch.dtype | None) -> None:
    for file in files:
        for name, tensor in _tensors_of(file):
            require_dense(f"{file}: {name}", tensor)
            flat, step = tensor.detach().reshape(-1), max(_CHUNK_BYTES // tensor.element_size(), 1)
            for first in range(0, max(flat.numel(), 1), step):
                _add(sums, name, flat[first : first + step], tensor.shape, first, dtype)


def _tensors_of(file: pathlib.Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that quantized tensors are deprecated; they are refused
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise FingerprintError(f"{file} cannot be read as a file of torch.save: {first_line(error)}") from None
    for key in _NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    is_named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)} if is_named else {}
    if not tensors:
        raise FingerprintError(f"{file} holds no tensors by name")
    yield from tensors.items()


def _add_distributed(sums: FingerprintSums, path: pathlib.Path, dtype: torch.dtype | None) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle may raise anything
        raise FingerprintError(f"{path} is no distributed checkpoint: {type(error).__name__}: {error}") from None
    tensors = {name: e for name, e in entries.items() if isinstance(e, dcp.TensorStorageMetadata)}
    if not tensors:
        raise FingerprintError(f"{path} holds no tensors")
    for batch in _batches({name: (e.size, e.properties.dtype) for name, e in tensors.items()}):
        for name, tensor in _distributed_tensors(path, batch).items():
            _add(sums, name, tensor.reshape(-1), tensor.shape, 0, dtype)


def _distributed_tensors(
    path: pathlib.Path, batch: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    try:
        state = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in batch.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(state, checkpoint_id=path, no_dist=True)
    except dcp.CheckpointException as error:  # no Exception; its message begins with a traceback
        causes = [first_line(cause) for cause, _ in error.failures.values()]
        raise FingerprintError(f"{path} cannot be read: {causes[0] if causes else first_line(error)}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise FingerprintError(f"{path} cannot be read: {first_line(error)}") from None
    return state


def _batches(
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> Iterator[dict[str, tuple[torch.Size, torch.dtype]]]:
    batch: dict[str, tuple[torch.Size, torch.dtype]] = {}
    batch_bytes = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = shape.numel() * dtype.itemsize
        if batch and batch_bytes + nbytes > _DCP_BATCH_BYTES:
            yield batch
            batch, batch_bytes = {}, 0
        batch[name] = shape, dtype
        batch_bytes += nbytes
    if batch:
        yield batch
