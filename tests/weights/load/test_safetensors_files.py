"""Safetensors files and their index: any part is read right, and a broken file is an error that names it and why."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import pickle
import struct
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import Placement, Shard

from fsdp_doctor import LoadError
from fsdp_doctor.weights.fsdp.shards import compute_part
from fsdp_doctor.weights.load import portions
from fsdp_doctor.weights.load.portions import InFile
from fsdp_doctor.weights.load.safetensors_files import SafetensorsFile, open_files, read_index

_MIB = 1 << 20


def _header(entries: dict[str, Any]) -> bytes:
    data = json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data


def _entry(**changed: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changed}}


def _in_a_mebibyte(garbage: bytes) -> bytes:
    return struct.pack("<Q", _MIB) + garbage + bytes(64)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a safetensors file"),
    "a few bytes": (b"\x01\x02", "is not a safetensors file"),
    "a zip file": (b"PK\x03\x04" + bytes(100), "is a zip file, as of torch.save, not a safetensors file: read"),
    "a pickle": (pickle.dumps([1]), "is a pickle, as of torch.save before torch 1.6, not a safetensors file: read"),
    "text": (b"Once upon a time there was a file", "is not a safetensors file"),
    "a header that ends early": (_header(_entry())[:20], "is truncated, or no"),
    "no JSON": (struct.pack("<Q", 4) + b"{abc", "is not JSON"),
    "nested too deeply": (struct.pack("<Q", 100_000) + b"[" * 100_000, "is not JSON"),
    "garbage": (_in_a_mebibyte(b"\xc9\x1f" * (_MIB // 2)), "is not JSON"),
    "a long number": (_in_a_mebibyte(b'{"a":' + b"9" * (_MIB - 6) + b"}"), "is not JSON"),
    "zeros": (_in_a_mebibyte(b"\0" * _MIB), "is not JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "is not a JSON object"),
    "a tensor that is a number": (_header({"w": 3}) + bytes(16), "w has the unknown dtype None"),
    "an unknown dtype": (_header(_entry(dtype="F7")) + bytes(16), "w has the unknown dtype 'F7'"),
    "a NaN shape": (_header(_entry(shape=[float("nan"), 2])) + bytes(16), "w has the shape [nan, 2]"),
    "a negative shape": (_header(_entry(shape=[-2, -2])) + bytes(16), "w has the shape [-2, -2]"),
    "an absurd shape": (_header(_entry(shape=[2**62, 2**62])) + bytes(16), "w has 16 bytes, but its shape"),
    "a shape of text": (_header(_entry(shape="22")) + bytes(16), "w has the shape '22'"),
    "offsets backwards": (_header(_entry(data_offsets=[16, 0])) + bytes(16), "w has -16 bytes"),
    "one offset": (_header(_entry(data_offsets=[16])) + bytes(16), "w has the offsets [16]"),
    "two in the same bytes": (_header(_entry() | {"v": _entry()["w"]}) + bytes(16), "v and w use the same bytes"),
    "data that ends early": (_header(_entry()) + bytes(15), "is truncated"),
    "a name twice": (struct.pack("<Q", 14) + b'{"w":1,"w":2} ', "occurs twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_path_and_the_reason(name: str, tmp_path: pathlib.Path) -> None:
    data, message = BROKEN[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(LoadError) as raised:
        SafetensorsFile(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("is_zip", [True, False])
def test_the_advice_for_a_file_of_torch_save_reads_it(is_zip: bool, tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth", _use_new_zipfile_serialization=is_zip)
    advice = 'torch.load(file, map_location="cpu", mmap=True, weights_only=True), without mmap if they are older'
    for path in (tmp_path / "model.pth", tmp_path):
        with pytest.raises(LoadError, match=r"model\.pth") as raised:
            open_files(path)
        assert advice in str(raised.value)
    state = torch.load(
        tmp_path / "model.pth", map_location="cpu", weights_only=True, **({"mmap": True} if is_zip else {})
    )
    assert torch.equal(state["w"], torch.ones(2))


def test_a_safetensors_file_that_begins_as_a_zip_file_is_read(tmp_path: pathlib.Path) -> None:
    header = json.dumps(_entry()).encode()
    length = int.from_bytes(b"PK\x03\x04", "little")
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + header)
        file.write(b" " * (length - len(header)) + bytes(16))
    assert list(SafetensorsFile(tmp_path / "w.safetensors").tensors) == ["w"]


@pytest.mark.parametrize("name", ["absent", "absent/w.safetensors", "file/w.safetensors", "long" * 100])
def test_a_path_that_cannot_be_opened_is_a_load_error(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"there is no file or directory|cannot be opened") as raised:
        open_files(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_pipe_or_a_directory_is_refused_without_waiting(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    for name in ("pipe", "directory"):
        with pytest.raises(LoadError, match=f"{name}.safetensors is not a regular file"):
            SafetensorsFile(tmp_path / f"{name}.safetensors")
    with pytest.raises(LoadError, match=r"index.json is not a regular file"):
        open_files(tmp_path)


INDEXES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is not an index of a checkpoint"),
    "nested too deeply": ("[" * 100_000, "is not an index of a checkpoint"),
    "a list": ("[]", "is not an index of a checkpoint"),
    "no map": ("{}", "is not an index of a checkpoint"),
    "a map that is a list": ('{"weight_map": ["a"]}', "is not an index of a checkpoint"),
    "a file that is a number": ('{"weight_map": {"a": 1}}', "is not an index of a checkpoint"),
    "a name twice": ('{"weight_map": {"w": "a", "w": "b"}}', "is not an index of a checkpoint"),
    **{
        f"file {file!r}": (f'{{"weight_map": {{"w": "{file}"}}}}', f"outside its directory: {file or repr('')}")
        for file in ("../a", "/a", "inside/a", "..", "")
    },
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("name", INDEXES)
def test_a_broken_index_is_refused_in_one_sentence(name: str, suffix: str, tmp_path: pathlib.Path) -> None:
    text, message = INDEXES[name]
    index = tmp_path / f"model.{suffix}.index.json"
    index.write_text(text)
    with pytest.raises(LoadError) as raised:
        read_index(tmp_path, suffix)
    assert message in str(raised.value)
    assert str(index) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_index_counts_only_for_its_suffix_and_only_if_unique(tmp_path: pathlib.Path) -> None:
    for suffix, other in (("safetensors", "bin"), ("bin", "safetensors")):
        directory = tmp_path / suffix
        directory.mkdir()
        assert read_index(directory, suffix) == {}
        (directory / f"model.{suffix}.index.json").write_text('{"weight_map": {"w": "a"}}')
        assert (read_index(directory, suffix), read_index(directory, other)) == ({"w": "a"}, {})
        (directory / f"second.{suffix}.index.json").write_text('{"weight_map": {"w": "b"}}')
        assert read_index(directory, suffix) == {}


def test_files_that_do_not_match_their_index_or_one_another_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError, match="contains no safetensors file"):
        open_files(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(LoadError, match=r"w is in .*a.safetensors and in .*b.safetensors"):
        open_files(tmp_path)
    for file, message in (("a", "lacks tensors that the index"), ("gone", "names missing files: .*gone.safetensors")):
        weight_map = {"w": "a.safetensors", "x": f"{file}.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(LoadError, match=message):
            open_files(tmp_path)


def _is_written(dtype: torch.dtype, path: pathlib.Path) -> bool:
    with contextlib.suppress(KeyError, RuntimeError, SafetensorError):
        save_file({"w": torch.zeros(16, dtype=torch.uint8).view(dtype)}, path)
    return path.exists() and "float4" not in str(dtype)


def test_every_dtype_of_whole_bytes_that_safetensors_writes_is_read(tmp_path: pathlib.Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    written = {dtype: method for dtype in dtypes if _is_written(dtype, method := tmp_path / str(dtype))}
    assert len(written) >= 16
    for dtype, method in written.items():
        assert SafetensorsFile(method).tensors["w"].dtype == dtype


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
            part = compute_part(rank, shape, torch.arange(3), [placement])
            expected = part.read(full).contiguous().view(-1).view(torch.uint8)
            portion = InFile(file, [stretch.convert_to_bytes(begin, 2) for stretch in part.list_stretches(shape)])
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
    read = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, *arguments: calls.append(read(self, *arguments)))
    (columns,) = compute_part(1, shape, torch.arange(2), [Shard(1)]).list_stretches(shape)
    portion = InFile(file, [columns.convert_to_bytes(file.tensors["w"].begin, 4)])
    portion.fill(torch.empty(portion.nbytes, dtype=torch.uint8), 0)
    assert len(calls) <= 8
    file.close()
