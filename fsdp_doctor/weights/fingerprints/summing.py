"""Fingerprints of tensors and of parts of tensors in an engine, or on the way to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor.weights.fingerprints.block_fingerprints import FingerprintSumsOfBlocks, add_ties, make_unsummed
from fsdp_doctor.weights.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    add_fingerprint,
    reduce_to_lanes,
)
from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock, make_grid_block, make_range_block
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.forms import describe_unless_dense
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.transport.shard_places import ShardPlace


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Block of a tensor: an engine's shard of a tensor, or its slice of a fused tensor.

    tensor: the block, which may be a view.
    shape: the shape of the whole tensor.
    offsets: the block's first index along each dim, by default 0. For example, if the rows of the up projection in a
        fused ``gate_up_proj`` begin at ``n``, ``TensorPart(fused[n:], shape=(n, hidden))`` is the whole of ``up_proj``.
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    offsets: Sequence[int] = ()

    def check(self, name: str) -> None:
        """Raises FingerprintError for a block that does not lie in the tensor."""
        offsets = self.offsets or (0,) * len(self.shape)
        if not len(self.shape) == len(offsets) == self.tensor.ndim:
            raise FingerprintError(
                f"{name}: a part must have as many dims as the whole tensor, and either an offset for each dim or no "
                f"offsets: shape {list(self.shape)}, offsets {list(offsets)}, part {list(self.tensor.shape)}"
            )
        for offset, length, whole in zip(offsets, self.tensor.shape, self.shape, strict=True):
            if offset < 0 or offset + length > whole:
                raise FingerprintError(
                    f"{name}: a part of the shape {list(self.tensor.shape)} that begins at {list(offsets)} is not "
                    f"inside a tensor of the shape {list(self.shape)}"
                )


class FingerprintSums(FingerprintSumsOfBlocks):
    """Sums tensors as they come; :meth:`fingerprints` returns the sums.

    A tensor is read on the stream that is current when it is added, and may be changed or freed afterwards.

    repeats: whether :meth:`repeat` will be called; in this case a tensor may be changed but must not be freed.
    """

    def add(self, name: str, tensor: torch.Tensor | TensorPart) -> None:
        """Adds a whole tensor, this rank's part of a DTensor, or a :class:`TensorPart`.

        A name may come once for each part of its tensor. Raises FingerprintError for a part that does not lie in its
        tensor and for a tensor that is not dense in memory, LayoutError (RuntimeError) for a DTensor that is not
        divided into shards, and TypeError unless ``name`` is a string and ``tensor`` a tensor or a part.
        """
        self.add_bucket([(name, tensor)])

    @torch.no_grad()
    def add_bucket(self, tensors: Iterable[tuple[str, torch.Tensor | TensorPart]]) -> None:
        """Adds tensors that are all available, such as a bucket that has arrived, in one launch for each device.

        Raises the errors of :meth:`add`. For tensors that are not contiguous, up to 64 MiB of copies are kept until
        they are summed.
        """
        for name, tensor in tensors:
            part, blocks = _divide_into_blocks(name, tensor)
            self.add_blocks(name, part, blocks, memory=_local_of(tensor))
        self.flush()

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Sums and yields tensors, such as weights on their way to an engine, with one launch for each tensor.

        Consecutive names of one tensor with the same values are noted as tied. :class:`RepeatedFingerprint` sums the
        shards instead, all in one launch.
        """
        last: Callable[[], torch.Tensor | None] = lambda: None  # noqa: E731, nothing came before the first
        for name, tensor in tensors:
            if last() is tensor:
                self._same_tensor[-1].append(name)
            else:
                self._same_tensor.append([name])
            last = private.make_weak_reference(tensor)
            self.add(name, tensor)
            yield name, tensor
            del tensor


def fingerprint_tensors(
    tensors: Mapping[str, torch.Tensor | TensorPart] | Iterable[tuple[str, torch.Tensor | TensorPart]],
) -> Fingerprints:
    """Fingerprints the tensors of a receiver, which may be whole tensors or parts of them, by the trainer's names.

    A rank that holds parts gets partial fingerprints; :func:`combine_fingerprints` adds the partial fingerprints of all
    ranks. No collective is called. The tensors of an iterator are summed and freed one by one. The tensors of a mapping
    or a list are summed in one launch for each device, or one for each 64 MiB of copies if they are not contiguous.
    Names whose tensors are the same memory are noted as tied. Raises the errors of :meth:`FingerprintSums.add`.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise TypeError(
            f"named tensors must be a mapping or pairs of a name and a tensor, not {type(tensors).__name__}"
        )
    if not isinstance(pairs, Iterator):
        return RepeatedFingerprintOfTensors(pairs).read()
    sums = FingerprintSums()
    for name, tensor in pairs:
        sums.add(name, tensor)
    return sums.fingerprints()


class RepeatedFingerprintOfTensors:
    """Repeats :func:`fingerprint_tensors` for the same tensors after each weight sync, in one launch, without waiting.

    tensors: whole tensors and parts, by name or as pairs, in the memory that the engine uses. A tensor that has moved
    to other memory is detected. The constructor sums once, so it raises the errors of :meth:`FingerprintSums.add`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | TensorPart] | Iterable[tuple[str, torch.Tensor | TensorPart]],
    ) -> None:
        self._tensors = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self._sum_anew()

    def start(self) -> None:
        """Sums the tensors' values at this point of the current stream."""
        if self._find_addresses() != self._addresses or not self._sums.repeat():
            self._sum_anew()

    def read(self) -> Fingerprints:
        """Returns the fingerprint of the last :meth:`start`. Waits for the device."""
        sums: dict[str, TensorFingerprint] = {}
        rows = self._sums.rows(torch.device("cpu")).tolist()
        for (name, part), row in zip(self._parts, rows, strict=True):
            # dataclasses.replace takes three times as long, while the device has nothing to do.
            lanes = reduce_to_lanes(row[:2])
            add_fingerprint(sums, name, TensorFingerprint(part.dtype, part.shape, part.first, part.num_summed, lanes))
        # One memory may be read as two dtypes, or as the conjugate of itself.
        return add_ties(sums, self._same_memory)

    def _sum_anew(self) -> None:
        self._sums = FingerprintSums(repeats=True)
        self._sums.add_bucket(self._tensors)
        self._parts = self._sums.named_parts()
        self._addresses = self._find_addresses()
        same_memory: dict[tuple[torch.device, int, torch.Size, tuple[int, ...]], list[str]] = {}
        for name, tensor in self._tensors:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.numel():
                key = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
                same_memory.setdefault(key, []).append(name)
        self._same_memory = list(same_memory.values())

    def _find_addresses(self) -> list[int]:
        return [_local_of(tensor).data_ptr() for _, tensor in self._tensors]


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises FingerprintError unless the tensor is dense in memory."""
    if form := describe_unless_dense(tensor):
        raise FingerprintError(f"{name} is {form}; fingerprints need dense tensors in memory")


def _divide_into_blocks(name: str, tensor: torch.Tensor | TensorPart) -> tuple[TensorFingerprint, list[IndexedBlock]]:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be a string, not {type(name).__name__}")
    values = tensor.tensor if isinstance(tensor, TensorPart) else tensor
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is not a tensor: {type(values).__name__}")
    if isinstance(tensor, TensorPart):
        require_dense(name, tensor.tensor)
        tensor.check(name)
        offsets = tensor.offsets or (0,) * len(tensor.shape)
        blocks = [
            make_grid_block(0, tensor.tensor.detach().contiguous(), offsets, compute_row_major_strides(tensor.shape))
        ]
        return make_unsummed(tensor.tensor.dtype, tensor.shape, blocks), blocks
    local = private.read_local_tensor(tensor).detach()
    require_dense(name, local)
    if isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements):
        place = ShardPlace(
            numel=local.numel(),
            offset=None,
            stride=compute_row_major_strides(tensor.shape),
            mesh=tensor.device_mesh,
            placements=tuple(tensor.placements),
        )
        blocks = divide_shard_into_blocks(local, tensor.shape, place)
    else:
        blocks = [make_range_block(0, local.contiguous(), 0)]
    return make_unsummed(tensor.dtype, tensor.shape, blocks), blocks


def _local_of(tensor: torch.Tensor | TensorPart) -> torch.Tensor:
    return private.read_local_tensor(tensor.tensor if isinstance(tensor, TensorPart) else tensor)


def divide_shard_into_blocks(
    local: torch.Tensor, shape: Sequence[int], place: ShardPlace, strides: Sequence[int] | None = None
) -> list[IndexedBlock]:
    """Divides a shard into blocks whose elements have known indices in the whole tensor.

    strides: for each dim of ``shape``, the distance between the numbers of neighbouring elements in the sum; by default
        row-major.
    """
    whole = compute_row_major_strides(shape)
    if place.offset is not None and place.stride == whole and strides is None:
        return [make_range_block(0, local, place.offset)]
    return [
        make_grid_block(0, part, offsets, strides or whole)
        for part, offsets in divide_shard_into_parts(local, shape, place)
    ]


def divide_shard_into_parts(
    local: torch.Tensor, shape: Sequence[int], place: ShardPlace
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Divides a shard into contiguous blocks with the tensor's dims, and yields each with its offsets in the tensor."""
    if place.offset is None:
        held = place.held_part(shape)
        view = local.reshape(held.shape)
        for in_tensor, in_shard in held.list_blocks():
            yield view[in_shard].contiguous(), tuple(dim.start for dim in in_tensor)
        return
    # The dims may have another order in memory than in the tensor.
    order = sorted(range(len(shape)), key=lambda dim: (-place.stride[dim], dim))
    inverse = [order.index(dim) for dim in range(len(shape))]
    for part, offsets in _divide_range(local.reshape(-1), place.offset, [shape[dim] for dim in order]):
        yield part.permute(inverse).contiguous(), tuple(offsets[at] for at in inverse)


def _divide_range(
    flat: torch.Tensor, first: int, shape: Sequence[int]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Divides a range of a flattened tensor into the end of one row, whole rows, and the beginning of another row."""
    if not flat.numel():
        return
    if len(shape) <= 1:
        yield flat.view(flat.shape if shape else ()), (first,) if shape else ()
        return
    row = compute_row_major_strides(shape)[0]
    begin, end = first, first + flat.numel()
    while begin < end:
        index, inside = divmod(begin, row)
        whole_rows = 0 if inside else (end - begin) // row
        length = whole_rows * row or min(row - inside, end - begin)
        part = flat[begin - first : begin - first + length]
        if whole_rows:
            yield part.view(whole_rows, *shape[1:]), (index, *(0 for _ in shape[1:]))
        else:
            for inner, offsets in _divide_range(part, inside, shape[1:]):
                yield inner.unsqueeze(0), (index, *offsets)
        begin += length
