"""Any range of a shard's bytes, read from a file, however the shard lies there."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Placement, Shard

from fsdp_doctor.fsdp.shards import held_part
from fsdp_doctor.load import portions
from fsdp_doctor.load.portions import InFile
from fsdp_doctor.load.safetensors_files import SafetensorsFile

_SHAPES: dict[tuple[int, ...], tuple[Placement, ...]] = {
    (37, 10): (Shard(0), Shard(1)),
    (5, 6, 7): (Shard(0), Shard(1), Shard(2)),
    (2, 3, 4, 5): (Shard(1), Shard(3)),
}


@pytest.mark.parametrize(("block", "gap"), [(64, 1 << 10), (1 << 10, 1 << 10), (1 << 10, 0)])
def test_any_bytes_of_a_shard_are_read_from_a_file(
    block: int, gap: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "_BLOCK_BYTES", block)
    monkeypatch.setattr(portions, "_LONGEST_GAP", gap)
    for shape, placements in _SHAPES.items():
        full = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
        save_file({"w": full}, tmp_path / "w.safetensors")
        file = SafetensorsFile(tmp_path / "w.safetensors")
        begin = file.tensors["w"].begin
        for placement, rank in itertools.product(placements, range(3)):
            part = held_part(rank, shape, torch.arange(3), [placement])
            expected = part.read(full).contiguous().view(-1).view(torch.uint8)
            portion = InFile(file, [some.in_bytes(begin, 2) for some in part.stretches(shape)])
            assert portion.nbytes == expected.numel()
            for start, length in itertools.product((0, 1, 16, 33), (0, 1, 7, 40, 10_000)):
                wanted = expected[start : start + length]
                read = torch.zeros_like(wanted)
                portion.fill(read, start)
                assert torch.equal(read, wanted), (shape, placement, rank, start, length)
        file.close()


def test_columns_are_read_with_few_calls(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4096, 64)
    save_file({"w": torch.ones(shape)}, tmp_path / "w.safetensors")
    file = SafetensorsFile(tmp_path / "w.safetensors")
    calls = []
    whole = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, *arguments: calls.append(whole(self, *arguments)))
    (columns,) = held_part(1, shape, torch.arange(2), [Shard(1)]).stretches(shape)
    portion = InFile(file, [columns.in_bytes(file.tensors["w"].begin, 4)])
    portion.fill(torch.empty(portion.nbytes, dtype=torch.uint8), 0)
    assert len(calls) <= 8
    file.close()
