"""The sum as it is defined, as torch operations and as Triton kernels: one and the same, however a tensor is divided.

The kernels run in Triton's interpreter, in a process of its own, where Triton is installed; on a GPU they are held
against torch operations by ``benchmarks/fingerprints.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from program import ROOT

from fsdp_doctor.weights.fingerprints import block_fingerprints, summing
from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock, make_grid_block, make_range_block
from fsdp_doctor.weights.fingerprints.summing import TensorPart

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool)


def defined(tensor: torch.Tensor) -> list[int]:
    """Computes as ``keyed_sum`` says it, word by word, in Python's numbers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 4)
    lanes = [0, 0]
    for index in range(len(data) // 4):
        word = int.from_bytes(data[4 * index : 4 * index + 4], "little")
        swapped = (word >> 16) | ((word & 0xFFFF) << 16)
        row, column = divmod(index, 4096)
        lanes[0] += word * _key(row, 2) * _key(column, 0)
        lanes[1] += swapped * _key(row, 3) * _key(column, 1)
    return [(lane + (1 << 63)) % (1 << 64) - (1 << 63) for lane in lanes]


def _key(counter: int, family: int) -> int:
    modulus = 1 << 64
    mixed = (4 * counter + family + 1) * 0x9E3779B97F4A7C15 % modulus
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % modulus
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % modulus
    return (mixed ^ (mixed >> 31)) | 1


def divisions(tensor: torch.Tensor) -> dict[str, list[IndexedBlock]]:
    """Divides one tensor in several ways: the sums of each must be the same."""
    flat, (rows, columns) = tensor.reshape(-1), tensor.shape
    left, right = tensor[:, :44].contiguous(), tensor[:, 44:].contiguous()
    shifted = torch.empty(flat.numel() + 1, dtype=tensor.dtype)[1:].copy_(flat)
    return {
        "whole": [make_range_block(0, flat, 0)],
        "where no word of memory begins": [make_range_block(0, shifted, 0)],
        "two ranges at an odd place": [make_range_block(0, flat[:5003], 0), make_range_block(0, flat[5003:], 5003)],
        "by columns": [
            make_grid_block(0, left, (0, 0), (columns, 1)),
            make_grid_block(0, right, (0, 44), (columns, 1)),
        ],
        "transposed in memory": [IndexedBlock(0, tensor.t().contiguous(), 0, (columns, rows), (1, columns))],
        "every other column": [
            IndexedBlock(0, tensor[:, at::2].contiguous(), at, tensor[:, at::2].shape, (columns, 2)) for at in (0, 1)
        ],
    }


def large_blocks() -> list[list[IndexedBlock]]:
    """Makes blocks of several programs of the kernel: words, and more dims than two."""
    tensor, sizes, strides = torch.randn(2, 3, 40, 150).bfloat16(), (2, 3, 40, 75), (18000, 6000, 150, 2)
    halves = [IndexedBlock(0, tensor[..., at::2].contiguous(), at, sizes, strides) for at in (0, 1)]
    return [[make_range_block(0, torch.randn(200_001), 17)], halves]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_as_it_is_defined_however_the_tensor_is_divided(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(97, 131) * 50).to(dtype)
    expected = defined(tensor)
    for division, blocks in divisions(tensor).items():
        sums = torch.zeros(1, 2, dtype=torch.int64)
        BlockSums(blocks, sums.device).add(sums)
        assert sums[0].tolist() == expected, division


def test_many_dims_are_summed_as_few() -> None:
    tensor = torch.randn(3, 4, 5, 6).bfloat16()
    blocks = [IndexedBlock(0, tensor[..., at::2].contiguous(), at, (3, 4, 5, 3), (120, 30, 6, 2)) for at in (0, 1)]
    sums = torch.zeros(1, 2, dtype=torch.int64)
    BlockSums(blocks, sums.device).add(sums)
    assert sums[0].tolist() == defined(tensor)


@pytest.mark.parametrize("form", ["tensors", "parts"])
def test_copies_of_noncontiguous_tensors_are_not_all_held_until_one_launch(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    launches: list[int] = []

    class Counted(BlockSums):
        def __init__(self, blocks: Sequence[IndexedBlock], device: torch.device) -> None:
            launches.append(sum(block.tensor.nbytes for block in blocks))
            super().__init__(blocks, device)

    whole = torch.zeros(16, 128)
    columns = {str(at): whole[:, at::2] for at in (0, 1)} | {"2": whole[:, 1:]}
    given = {name: TensorPart(one, one.shape) if form == "parts" else one for name, one in columns.items()}
    monkeypatch.setattr(block_fingerprints, "BlockSums", Counted)
    monkeypatch.setattr(block_fingerprints, "_MOST_KEPT_BYTES", 4096)
    summing.fingerprint_tensors(given)
    assert launches == [one.nbytes for one in columns.values()]
    launches.clear()
    summing.fingerprint_tensors({str(row): one for row, one in enumerate(whole.chunk(4))})
    assert launches == [whole.nbytes]


_INTERPRETED = """
import torch
from fsdp_doctor.weights.fingerprints import sum_kernels
from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
from fsdp_doctor.weights.fingerprints.keyed_sum import WordRun, divide_into_words, make_range_block
from test_sum_kernels import DTYPES, divisions, large_blocks

# The interpreter's time goes by the number of tiles.
sum_kernels.SHAPE = sum_kernels.ProgramShape(columns=2048, rows=32, tile_rows=16)
torch.manual_seed(0)
compared = 0
for dtype in (None, *DTYPES):
    blocks_of = large_blocks() if dtype is None else divisions((torch.randn(97, 131) * 50).to(dtype)).values()
    for blocks in blocks_of:
        expected, found = (torch.zeros(1, 2, dtype=torch.int64) for _ in range(2))
        BlockSums(blocks, expected.device).add(expected)
        parts = [part for block in blocks for part in divide_into_words(block)]
        runs = [part for part in parts if isinstance(part, WordRun)]
        grids = [part for part in parts if not isinstance(part, WordRun)]
        table = sum_kernels.SumTable(runs, grids, found.device)
        table.add(found)
        found.zero_()
        table.add(found)
        assert torch.equal(found, expected), (dtype, found, expected)
        compared += 1

first, second = torch.randn(9000), torch.randn(9000)
expected, found = (torch.zeros(1, 2, dtype=torch.int64) for _ in range(2))
BlockSums([make_range_block(0, second[3:], 3)], expected.device).add(expected)
table = sum_kernels.SumTable(list(divide_into_words(make_range_block(0, first[3:], 3))), [], found.device)
table.move({first.untyped_storage().data_ptr(): second.untyped_storage().data_ptr()})
table.add(found)
assert torch.equal(found, expected), "a table that was moved"
print(compared)
"""


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_sum_as_torch_operations_do() -> None:
    path = os.pathsep.join([str(ROOT), os.path.dirname(__file__), str(ROOT / "tests"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{2 + len(DTYPES) * 6}\n"), done.stderr
