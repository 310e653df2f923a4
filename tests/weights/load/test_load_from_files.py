"""Safetensors files: each rank reads its own rows, and what is no such file is an error on every rank."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.extraction import EVEN, UNEVEN, Tensors, assert_same, extracted, fsdp1, fsdp2, new_net, raises_soon
from support.loading import BUCKET_BYTES, everywhere, filled_in_place, on_first, on_four, other_tensors
from support.ranks import device_type, this_rank, together
from support.training import shared_directory
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_doctor import FingerprintError, LoadError, fingerprint_checkpoint, load_full_tensors
from fsdp_doctor.checkpoints.files import OpenFile
from fsdp_doctor.weights.load import full_load
from fsdp_doctor.weights.load.safetensors_files import SafetensorsFile
from fsdp_doctor.weights.transport.host_copies import HostCopies


def _saved(tensors: Tensors) -> Tensors:
    """safetensors writes no tensor under two names."""
    return {name: tensor.contiguous() for name, tensor in tensors.items() if name != "head.weight"}


def _write(directory: pathlib.Path, tensors: Tensors, *, files: int, index: bool) -> None:
    directory.mkdir()
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        own = names[number::files]
        save_file({name: tensors[name] for name in own}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@contextmanager
def _files(tensors: Tensors) -> Iterator[dict[str, pathlib.Path]]:
    """A file, and directories with and without an index, that all ranks have."""
    with shared_directory() as name:
        root = pathlib.Path(name)
        places = {"file": root / "model.safetensors", "index": root / "index", "plain": root / "plain"}
        if this_rank() == 0:
            save_file(_saved(tensors), places["file"])
            _write(places["index"], _saved(tensors), files=3, index=True)
            _write(places["plain"], _saved(tensors), files=2, index=False)
        torch.distributed.barrier()
        yield places


@everywhere
def test_files_fill_every_shard() -> None:
    for dims in (EVEN, UNEVEN):
        expected = other_tensors(**dims)
        with _files(expected) as places:
            for place, source in itertools.product(places.values(), (lambda path: path, on_first, str)):
                model = fsdp2(new_net(**dims))
                with filled_in_place(model, expected):
                    load_full_tensors(model, source(place), bucket_bytes=BUCKET_BYTES)
            if device_type() != "cpu":
                for model in (
                    fsdp2(new_net(**dims), offload_policy=CPUOffloadPolicy()),
                    fsdp2(new_net(**dims)).to("cpu"),
                ):
                    with filled_in_place(model, expected):
                        load_full_tensors(model, places["index"])


@everywhere
def test_files_fill_flat_shards_and_what_is_cast() -> None:
    expected = other_tensors(**EVEN, empty=False)
    halves = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in expected.items()}
    with _files(halves) as places:
        models = [fsdp2(new_net(**EVEN, empty=False))]
        if device_type() != "cpu":
            models.append(fsdp1(new_net(**EVEN, empty=False)))
        for model in models:
            with raises_soon(LoadError, "is torch.bfloat16 in the source and torch.float32 in the model", "nothing"):
                load_full_tensors(model, places["file"])
            load_full_tensors(model, places["file"], dtype="cast")
            assert_same(extracted(model), {name: t.to(expected[name].dtype) for name, t in halves.items()})


@on_four
def test_files_fill_columns() -> None:
    """Shards of dim 1 are many stretches of a file."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.Linear(12, 4, bias=False))
    expected = {
        name: torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) for name, t in model.state_dict().items()
    }
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))
    with _files(expected) as places:
        load_full_tensors(model, places["file"])
    assert_same(extracted(model), expected)


def _truncate(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _of_another_model(path: pathlib.Path) -> None:
    save_file({"transformer.wte.weight": torch.ones(3, 4)}, path)


SPOILED: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "truncated": (_truncate, "is truncated"),
    "of another model": (_of_another_model, "has 1 tensor that the model does not have: transformer.wte.weight"),
    "of torch.save": (lambda path: torch.save(other_tensors(), path), "is a zip file, as of torch.save"),
    "no safetensors": (lambda path: path.write_bytes(b"no" * 99) and None, "is not a safetensors file"),
}


@everywhere
def test_an_unusable_file_is_an_error_on_every_rank_and_writes_nothing() -> None:
    for (spoil, message), source in itertools.product(SPOILED.values(), (lambda path: path, on_first)):
        model = fsdp2(new_net())
        before = extracted(model)
        with _files(other_tensors()) as places:
            if this_rank() == 0:
                spoil(places["file"])
            torch.distributed.barrier()
            with raises_soon(LoadError, message, "written nothing"):
                load_full_tensors(model, source(places["file"]))
        assert_same(extracted(model), before)


@everywhere
def test_a_file_that_one_rank_has_is_an_error_on_every_rank() -> None:
    model = fsdp2(new_net())
    before = extracted(model)
    with _files(other_tensors()) as places:
        method = places["file"] if this_rank() == 0 else places["file"].with_name("elsewhere.safetensors")
        with raises_soon(LoadError, "there is no file or directory", "elsewhere.safetensors", "written nothing"):
            load_full_tensors(model, method)
        together()
        absent = places["file"].with_name("absent")
        for source in (absent, on_first(absent)):
            with raises_soon(LoadError, "there is no file or directory", str(absent), "written nothing"):
                load_full_tensors(model, source)
            together()
    assert_same(extracted(model), before)


OTHERS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "all values": (lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()}, "have other values"),
    "one tensor": (lambda tensors: tensors | {"embed.weight": tensors["embed.weight"] * 2}, "have other values"),
    "no tensor": (lambda tensors: {}, "have other names, shapes or dtypes"),
    "another name": (lambda tensors: tensors | {"more": torch.ones(2)}, "have other names, shapes or dtypes"),
}


@everywhere
def test_files_that_differ_on_one_rank_are_an_error_on_every_rank() -> None:
    """Covers nodes with a disk of their own."""
    for change, message in OTHERS.values():
        model = fsdp2(new_net())
        before, tensors = extracted(model), _saved(other_tensors())
        with shared_directory() as shared:
            own = pathlib.Path(shared) / f"of rank {this_rank()}"
            _write(own, change(tensors) if this_rank() == 1 else tensors, files=2, index=True)
            with raises_soon(LoadError, f"of rank 1 in {own.with_name('of rank 1')} {message}", "written nothing"):
                load_full_tensors(model, own, strict=False)
            assert_same(extracted(model), before)
            load_full_tensors(model, own if this_rank() == 0 else None, strict=False)
            torch.distributed.barrier()


@everywhere
def test_files_that_are_divided_otherwise_are_the_same() -> None:
    expected = other_tensors()
    with shared_directory() as shared:
        own = pathlib.Path(shared) / f"of rank {this_rank()}"
        _write(own, _saved(expected), files=1 + this_rank(), index=True)
        model = fsdp2(new_net())
        with filled_in_place(model, expected):
            load_full_tensors(model, own)
        torch.distributed.barrier()


@everywhere
def test_a_file_truncated_while_reading_is_an_error_on_every_rank() -> None:
    for source in (lambda path: path, on_first):
        model = fsdp2(new_net())
        with _files(other_tensors()) as places, pytest.MonkeyPatch.context() as patch:
            whole, write = SafetensorsFile.read, full_load.fill_targets

            def read(self: SafetensorsFile, offset: int, into: memoryview, whole: Any = whole) -> None:
                if self.path == places["file"] and offset > 100_000 and this_rank() == 0:
                    _truncate_to(self.path, offset)
                whole(self, offset, into)

            def run(*arguments: Any, patch: Any = patch, read: Any = read, write: Any = write) -> Any:
                # Not for what is read to compare the ranks' files.
                patch.setattr(SafetensorsFile, "read", read)
                return write(*arguments)

            patch.setattr(full_load, "fill_targets", run)
            with raises_soon(LoadError, str(places["file"]), "had begun to write"):
                load_full_tensors(model, source(places["file"]), bucket_bytes=BUCKET_BYTES)


def _overwrite(path: pathlib.Path) -> None:
    """Overwrites as many bytes, in the same file."""
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def _replace(path: pathlib.Path) -> None:
    """Replaces by a file of the same size and time."""
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    _overwrite(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@everywhere
def test_a_file_changed_while_reading_is_an_error_on_every_rank() -> None:
    for change, source in itertools.product((_overwrite, _replace), (lambda path: path, on_first)):
        model = fsdp2(new_net())
        with _files(other_tensors()) as places, pytest.MonkeyPatch.context() as patch:
            method, write, finish = places["file"], full_load.fill_targets, HostCopies.finish
            if this_rank() == 0:
                # Another time than that of a change, however coarse the clock of the files is.
                os.utime(method, ns=(10**18, 10**18))
            torch.distributed.barrier()
            to_change = [change] if this_rank() == 0 else []

            def finished(self: Any, path: Any = method, to_change: Any = to_change, finish: Any = finish) -> None:
                while to_change:
                    to_change.pop()(path)
                finish(self)

            def run(*arguments: Any, patch: Any = patch, finished: Any = finished, write: Any = write) -> Any:
                patch.setattr(HostCopies, "finish", finished)
                return write(*arguments)

            patch.setattr(full_load, "fill_targets", run)
            with raises_soon(LoadError, str(method), "had begun to write"):
                load_full_tensors(model, source(method), bucket_bytes=BUCKET_BYTES)
            torch.distributed.barrier()


def test_a_checkpoint_that_changes_while_its_fingerprint_is_taken_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(_saved(other_tensors()), path)
    os.utime(path, ns=(10**18, 10**18))
    fingerprint_checkpoint(path)
    whole = OpenFile.read_into

    def read(self: OpenFile, offset: int, into: memoryview) -> None:
        whole(self, offset, into)
        _overwrite(path)

    monkeypatch.setattr(OpenFile, "read_into", read)
    with pytest.raises(FingerprintError, match=r"model\.safetensors"):
        fingerprint_checkpoint(path)


def _truncate_to(path: pathlib.Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@everywhere
def test_a_file_removed_while_reading_is_read_to_its_end() -> None:
    model, expected = fsdp2(new_net()), other_tensors()
    with _files(expected) as places, pytest.MonkeyPatch.context() as patch:
        whole = SafetensorsFile.read

        def read(self: SafetensorsFile, offset: int, into: memoryview) -> None:
            if offset > 100_000:
                self.path.unlink(missing_ok=True)
            whole(self, offset, into)

        patch.setattr(SafetensorsFile, "read", read)
        load_full_tensors(model, places["file"])
        torch.distributed.barrier()
        assert not places["file"].exists()
    assert_same(extracted(model), expected)
