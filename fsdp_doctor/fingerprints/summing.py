"""Fingerprints of tensors and of parts of tensors: what an engine holds, or what is on its way there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor.extract.local import ShardPlace, row_major
from fsdp_doctor.extract.sources import dtype_name
from fsdp_doctor.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    add_fingerprint,
    to_lanes,
)
from fsdp_doctor.fingerprints.keyed_sum import IndexedBlock, add_sums, grid_block, range_block
from fsdp_doctor.fsdp import private
from fsdp_doctor.load.source import describe_unless_dense

# Of copies that are kept until they are summed.
_MOST_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class TensorPart:
    """A block of a tensor: an engine's shard of it, or its slice of a fused tensor.

    tensor: the block, which may be a view. shape: of the whole tensor. offsets: where the block begins, one for each
    dim; by default at the beginning. If the rows of the up projection in a fused ``gate_up_proj`` begin at ``n``,
    ``TensorPart(fused[n:], shape=(n, hidden))`` is the whole of ``up_proj``.
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    offsets: Sequence[int] = ()

    def check(self, name: str) -> None:
        """Raises FingerprintError for a block that does not lie in the tensor."""
        offsets = self.offsets or (0,) * len(self.shape)
        if not len(self.shape) == len(offsets) == self.tensor.ndim:
            raise FingerprintError(
                f"{name}: a part has as many dims as the whole tensor, and an offset for each or none: "
                f"shape {list(self.shape)}, offsets {list(offsets)}, part {list(self.tensor.shape)}"
            )
        for offset, length, whole in zip(offsets, self.tensor.shape, self.shape, strict=True):
            if offset < 0 or offset + length > whole:
                raise FingerprintError(
                    f"{name}: a part of the shape {list(self.tensor.shape)} that begins at {list(offsets)} "
                    f"does not lie in a tensor of the shape {list(self.shape)}"
                )


class FingerprintSums:
    """Sums tensors as they come; :meth:`fingerprints` returns the sums.

    A tensor is read on the stream that is current when it is added, and may be changed or freed afterwards.
    """

    def __init__(self) -> None:
        self._sums: dict[str, TensorFingerprint] = {}
        self._waiting: list[tuple[str, TensorFingerprint, list[IndexedBlock]]] = []
        self._summed: list[tuple[list[tuple[str, TensorFingerprint]], torch.Tensor]] = []
        self._kept_bytes = 0
        self._same_tensor: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor | TensorPart) -> None:
        """Adds a whole tensor, this rank's part of a DTensor, or a part. A name may come once for each part of it.

        Raises FingerprintError for a part that does not lie in its tensor and for a tensor that is not dense in memory,
        LayoutError (RuntimeError) for a DTensor that is not divided into shards, TypeError unless it is a string and a
        tensor.
        """
        with torch.no_grad():
            part, blocks = _blocks_of(name, tensor)
        self.add_blocks(name, part, blocks)
        self.flush()

    def add_blocks(
        self, name: str, tensor: TensorFingerprint, blocks: list[IndexedBlock], *, kept_bytes: int = 0
    ) -> None:
        """Adds blocks that are summed together with the next ones: their memory must not change until :meth:`flush`.

        tensor: with lanes of zero. kept_bytes: of memory that lives for the sum alone; 64 MiB of it cause a flush.
        """
        self._waiting.append((name, tensor, blocks))
        self._kept_bytes += kept_bytes
        if self._kept_bytes >= _MOST_KEPT_BYTES:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Launches the sums of what was added, without waiting for the device."""
        by_device: dict[torch.device, list[tuple[str, TensorFingerprint, list[IndexedBlock]]]] = {}
        for entry in self._waiting:
            device = entry[2][0].tensor.device if entry[2] else torch.device("cpu")
            by_device.setdefault(device, []).append(entry)
        for device, entries in by_device.items():
            into = torch.zeros(len(entries), 2, dtype=torch.int64, device=device)
            for number, (_, _, blocks) in enumerate(entries):
                for block in blocks:
                    block.number = number
            add_sums([block for _, _, blocks in entries for block in blocks], into)
            self._summed.append(([(name, tensor) for name, tensor, _ in entries], into))
        self._waiting, self._kept_bytes = [], 0

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Sums and yields tensors, such as weights on their way to an engine.

        Consecutive names of one tensor with the same values are noted as tied.
        """
        last: Callable[[], torch.Tensor | None] = lambda: None  # noqa: E731, nothing came before the first
        for name, tensor in tensors:
            if last() is tensor:
                self._same_tensor[-1].append(name)
            else:
                self._same_tensor.append([name])
            last = private.weak_reference(tensor)
            self.add(name, tensor)
            yield name, tensor
            del tensor

    def fingerprints(self) -> Fingerprints:
        """Waits for the device. Raises FingerprintError for a name that came twice."""
        self.flush()
        for entries, into in self._summed:
            for (name, tensor), sums in zip(entries, into.tolist(), strict=True):
                add_fingerprint(self._sums, name, replace(tensor, lanes=to_lanes(sums)))
        self._summed = []
        return _with_ties(dict(self._sums), self._same_tensor)


def fingerprint_tensors(
    tensors: Mapping[str, torch.Tensor | TensorPart] | Iterable[tuple[str, torch.Tensor | TensorPart]],
) -> Fingerprints:
    """Sums what a receiver holds: whole tensors, or its parts of them, by the trainer's names.

    A rank that holds parts gets partial fingerprints; :func:`combine_fingerprints` adds those of all ranks. No
    collective. The tensors of an iterator are summed and freed one by one; those of a mapping or a list are summed in
    one launch a device, or one for each 64 MiB of copies of what is not contiguous; names whose tensors are the same
    memory are noted as tied.

    Raises as :meth:`FingerprintSums.add`.
    """
    sums = FingerprintSums()
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise TypeError(f"tensors by name are a mapping or pairs of a name and a tensor, not {type(tensors).__name__}")
    if isinstance(pairs, Iterator):
        for name, tensor in pairs:
            sums.add(name, tensor)
        return sums.fingerprints()
    same_memory: dict[tuple[torch.device, int, torch.Size, tuple[int, ...]], list[str]] = {}
    with torch.no_grad():
        for name, tensor in pairs:
            fingerprint, blocks = _blocks_of(name, tensor)
            sums.add_blocks(name, fingerprint, blocks, kept_bytes=_copied_bytes(tensor, blocks))
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.numel():
                key = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
                same_memory.setdefault(key, []).append(name)
    # One memory may be read as two dtypes, or as the conjugate of itself.
    return _with_ties(sums.fingerprints().tensors, same_memory.values())


def _with_ties(tensors: Mapping[str, TensorFingerprint], groups: Iterable[Sequence[str]]) -> Fingerprints:
    """groups: names that are tied if their tensors are the same."""
    tied = tuple(tuple(names) for names in groups if len(names) > 1 and len({tensors[name] for name in names}) == 1)
    return Fingerprints(tensors, tied)


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises FingerprintError for a tensor whose elements do not lie in memory one by one."""
    if form := describe_unless_dense(tensor):
        raise FingerprintError(f"{name} is {form}; fingerprints are of dense tensors that are in memory")


def unsummed(dtype: torch.dtype, shape: Sequence[int], blocks: Sequence[IndexedBlock]) -> TensorFingerprint:
    """The fingerprint of the blocks with lanes of zero."""
    filled = [block for block in blocks if block.tensor.numel()]
    first = min((block.base for block in filled), default=0)
    num_summed = sum(block.tensor.numel() for block in filled)
    return TensorFingerprint(dtype_name(dtype), tuple(shape), first, num_summed, (0, 0))


def _blocks_of(name: str, tensor: torch.Tensor | TensorPart) -> tuple[TensorFingerprint, list[IndexedBlock]]:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a string, not {type(name).__name__}")
    values = tensor.tensor if isinstance(tensor, TensorPart) else tensor
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is no tensor: {type(values).__name__}")
    if isinstance(tensor, TensorPart):
        require_dense(name, tensor.tensor)
        tensor.check(name)
        offsets = tensor.offsets or (0,) * len(tensor.shape)
        blocks = [grid_block(0, tensor.tensor.detach().contiguous(), offsets, row_major(tensor.shape))]
        return unsummed(tensor.tensor.dtype, tensor.shape, blocks), blocks
    local = private.local_tensor(tensor).detach()
    require_dense(name, local)
    if isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements):
        place = ShardPlace(
            numel=local.numel(),
            offset=None,
            stride=row_major(tensor.shape),
            mesh=tensor.device_mesh,
            placements=tuple(tensor.placements),
        )
        blocks = blocks_of_shard(local, tensor.shape, place)
    else:
        blocks = [range_block(0, local.contiguous(), 0)]
    return unsummed(tensor.dtype, tensor.shape, blocks), blocks


def _copied_bytes(tensor: torch.Tensor | TensorPart, blocks: Sequence[IndexedBlock]) -> int:
    """Bytes of the blocks that are copies of the tensor's memory on this rank."""
    local = private.local_tensor(tensor.tensor if isinstance(tensor, TensorPart) else tensor)
    memory = local.untyped_storage().data_ptr()
    return sum(block.tensor.nbytes for block in blocks if block.tensor.untyped_storage().data_ptr() != memory)


def blocks_of_shard(
    local: torch.Tensor, shape: Sequence[int], place: ShardPlace, strides: Sequence[int] | None = None
) -> list[IndexedBlock]:
    """The blocks of a shard, with the places of their elements in the whole tensor.

    strides: of the elements' numbers in the sum, one for each dim of ``shape``; by default row-major.
    """
    whole = row_major(shape)
    if place.offset is not None and place.stride == whole and strides is None:
        return [range_block(0, local, place.offset)]
    return [grid_block(0, part, offsets, strides or whole) for part, offsets in parts_of_shard(local, shape, place)]


def swap_halves(part: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], dim: int) -> Iterator[IndexedBlock]:
    """Divides a block at the middle of the dim, and gives the places of each half to the other; none of an odd dim."""
    if dim >= len(shape) or shape[dim] % 2:
        return
    half = shape[dim] // 2
    inside = min(max(half - offsets[dim], 0), part.shape[dim])
    for begin, length, moved in ((0, inside, half), (inside, part.shape[dim] - inside, -half)):
        if length:
            target = list(offsets)
            target[dim] += begin + moved
            yield grid_block(0, part.narrow(dim, begin, length).contiguous(), target, row_major(shape))


def parts_of_shard(
    local: torch.Tensor, shape: Sequence[int], place: ShardPlace
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Divides a shard into contiguous blocks with the tensor's dims, and yields each with its offsets in the tensor."""
    if place.offset is None:
        held = place.held_part(shape)
        view = local.reshape(held.shape)
        for in_tensor, in_shard in held.blocks():
            yield view[in_shard].contiguous(), tuple(dim.start for dim in in_tensor)
        return
    # The dims may have another order in memory than in the tensor.
    order = sorted(range(len(shape)), key=lambda dim: (-place.stride[dim], dim))
    inverse = [order.index(dim) for dim in range(len(shape))]
    for part, offsets in _parts_of_range(local.reshape(-1), place.offset, [shape[dim] for dim in order]):
        yield part.permute(inverse).contiguous(), tuple(offsets[at] for at in inverse)


def _parts_of_range(
    flat: torch.Tensor, first: int, shape: Sequence[int]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Divides a range of a flattened tensor into a part of a row, whole rows, and a part of another row."""
    if not flat.numel():
        return
    if len(shape) <= 1:
        yield flat.view(flat.shape if shape else ()), (first,) if shape else ()
        return
    row = row_major(shape)[0]
    begin, end = first, first + flat.numel()
    while begin < end:
        index, inside = divmod(begin, row)
        whole_rows = 0 if inside else (end - begin) // row
        length = whole_rows * row or min(row - inside, end - begin)
        part = flat[begin - first : begin - first + length]
        if whole_rows:
            yield part.view(whole_rows, *shape[1:]), (index, *(0 for _ in shape[1:]))
        else:
            for inner, offsets in _parts_of_range(part, inside, shape[1:]):
                yield inner.unsqueeze(0), (index, *offsets)
        begin += length
