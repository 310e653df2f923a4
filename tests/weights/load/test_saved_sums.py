"""Files that a save left with its checksums: other bytes are refused on every rank before anything is written."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors import safe_open
from support.extraction import EVEN, assert_same, extracted, fsdp2, new_net, raises_soon
from support.loading import everywhere, on_first, on_four
from support.ranks import this_rank
from support.training import shared_directory

from fsdp_doctor import LoadError, load_full_tensors, save_full_tensors
from fsdp_doctor.checkpoints.marker import MARKER
from fsdp_doctor.weights.load import saved_sums
from fsdp_doctor.weights.load.saved_sums import Share, find_share


@contextmanager
def _saved_with_a_changed_byte() -> Iterator[tuple[pathlib.Path, str]]:
    """A save of whose last tensor the last byte is another, and that tensor's name."""
    with shared_directory() as directory:
        path = pathlib.Path(directory) / "saved"
        save_full_tensors(fsdp2(new_net(**EVEN)), path, names="model")
        file = next(path.glob("*.safetensors"))
        if this_rank() == 0:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        dist.barrier()
        with safe_open(file, framework="pt") as opened:
            yield path, opened.offset_keys()[-1]


@everywhere
def test_a_load_compares_every_tensor_with_the_sums_of_its_save() -> None:
    with shared_directory() as directory:
        path = pathlib.Path(directory) / "saved"
        saved = fsdp2(new_net(**EVEN))
        report = save_full_tensors(saved, path, names="model")
        model = fsdp2(new_net(**EVEN))
        for source in (path, on_first(path)):
            loaded = load_full_tensors(model, source)
            assert loaded.checked == loaded.loaded > 5, report
        assert load_full_tensors(model, path, check_sums=False).checked == 0
        assert_same(extracted(model), extracted(saved))


@everywhere
def test_one_other_byte_is_refused_by_name_on_every_rank() -> None:
    with _saved_with_a_changed_byte() as (path, name):
        model = fsdp2(new_net(**EVEN))
        before = extracted(model)
        for source in (path, on_first(path)):
            with raises_soon(LoadError, name, "check_sums=False", "nothing"):
                load_full_tensors(model, source)
            assert_same(extracted(model), before)
        load_full_tensors(model, path, check_sums=False)


@everywhere
def test_the_sum_of_a_large_tensor_is_put_together_from_pieces() -> None:
    with mock.patch.object(saved_sums, "_PIECE_BYTES", 24), mock.patch.object(saved_sums, "_CHUNK_BYTES", 16):
        with shared_directory() as directory:
            path = pathlib.Path(directory) / "saved"
            save_full_tensors(fsdp2(new_net(**EVEN)), path, names="model")
            assert load_full_tensors(fsdp2(new_net(**EVEN)), path).checked > 5
        with _saved_with_a_changed_byte() as (path, name), raises_soon(LoadError, name):
            load_full_tensors(fsdp2(new_net(**EVEN)), path)


@on_four
def test_four_ranks_that_share_the_files_find_the_byte() -> None:
    with _saved_with_a_changed_byte() as (path, name), raises_soon(LoadError, name, "nothing"):
        load_full_tensors(fsdp2(new_net(**EVEN)), path)


def _forget_a_sum(marked: dict[str, Any]) -> None:
    next(iter(marked["files"].values()))["sums"].popitem()


def _forget_the_save(marked: dict[str, Any]) -> None:
    del marked["save"]


@everywhere
def test_a_marker_that_does_not_fit_its_files_is_refused() -> None:
    for change in (_forget_a_sum, _forget_the_save):
        with shared_directory() as directory:
            path = pathlib.Path(directory) / "saved"
            save_full_tensors(fsdp2(new_net(**EVEN)), path, names="model")
            if this_rank() == 0:
                marked = json.loads((path / MARKER).read_text())
                change(marked)
                (path / MARKER).write_text(json.dumps(marked))
            dist.barrier()
            with raises_soon(LoadError, MARKER, "check_sums=False", "nothing"):
                load_full_tensors(fsdp2(new_net(**EVEN)), path)


def test_ranks_of_a_node_share_the_files_only_where_all_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find_share((0, 1, 2, 3), 4) == Share(1, 2)
    assert find_share((0, 1), 4) == Share(0, 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert find_share((0, 1, 2, 3), 4) == Share(0, 1)
