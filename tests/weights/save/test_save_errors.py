"""A save that fails on one rank fails on all, leaves nothing that looks whole, and the older checkpoint as it was."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import forked
from support.extraction import everywhere, fsdp2, new_net, raises_soon, sharded_net, tensors_of
from support.inside import doctor
from support.ranks import this_device, this_rank, together, world_size
from support.saving import new_directory
from torch import nn

from fsdp_doctor import BuffersDiffer, LoadError, SaveError, load_full_tensors, save_full_tensors, save_optimizer_state
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.save.writing import Writer


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    """Reads all files, hidden ones too."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def fail_at(method: str, rank: int, error: BaseException) -> Any:
    """Makes a method of the writer raise on that rank."""
    if this_rank() != rank:
        return mock.patch.object(Writer, "_none", create=True)
    return mock.patch.object(Writer, method, side_effect=error)


@everywhere
def test_an_error_on_one_rank_fails_all_and_keeps_the_older_checkpoint() -> None:
    model, _ = sharded_net()
    last = world_size() - 1
    with new_directory() as directory:
        save_full_tensors(model, directory, names="model", step=1)
        before = contents(directory)
        for rank in (0, last):
            for method in ("write", "finish"):
                error = OSError(errno.ENOSPC, "No space left on device")
                expected = (
                    (OSError, "No space left") if this_rank() == rank else (SaveError, f"rank {rank}", "No space")
                )
                with fail_at(method, rank, error), raises_soon(*expected):
                    save_full_tensors(model, directory, names="model", overwrite=True, step=2)
                together()
                assert contents(directory) == before
                together()
        with raises_soon(SaveError, "already has", ": name another"):
            save_full_tensors(model, directory, names="model")
        together()
        assert contents(directory) == before
        together()
        save_full_tensors(model, directory, names="model", overwrite=True, step=3, largest_file=100_000)
        assert json.loads((directory / "fsdp-doctor.json").read_text())["step"] == 3
        assert not (directory / "model.safetensors").exists()
        if this_rank() == 0:
            assert verify(directory).answer == "sound"


@everywhere
def test_differing_or_invalid_arguments_are_refused_before_anything_is_made() -> None:
    model, _ = sharded_net()
    with new_directory() as directory:
        with raises_soon(SaveError, "the ranks do not save the same"):
            save_full_tensors(model, directory, names="model", step=this_rank())
        with raises_soon(ValueError, 'names="model"'):
            save_full_tensors(model, directory)
        with raises_soon(ValueError, "largest_file"):
            save_full_tensors(model, directory, names="model", largest_file=0)
        together()
        assert not directory.exists()
        (directory.parent / "file").touch()
        for place in (directory.parent / "file" / "saved", pathlib.Path("/proc/none/saved")):
            with raises_soon(SaveError, "cannot be made"):
                save_full_tensors(model, place, names="model")
            together()


@everywhere
def test_an_empty_path_is_refused_on_every_rank() -> None:
    model, _ = sharded_net()
    optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
    calls: list[tuple[type[Exception], Any, Callable[[Any], object]]] = [
        (SaveError, ".", lambda path: save_full_tensors(model, path, names="model")),
        (SaveError, ".", lambda path: save_optimizer_state(model, optimizer, path)),
        (LoadError, None, lambda path: load_full_tensors(model, path)),
    ]
    with new_directory() as directory:
        if this_rank() == 0:
            directory.mkdir()
        together()
        with contextlib.chdir(directory) if sys.version_info >= (3, 11) else contextlib.nullcontext():
            for kind, valid, call in calls:
                with raises_soon(ValueError, "the path is empty"):
                    call("")
                together()
                with raises_soon(ValueError if this_rank() == 0 else kind, "the path is empty"):
                    call("" if this_rank() == 0 else valid)
                together()
        assert not contents(directory)
        together()


@everywhere
def test_an_unsharded_model_that_differs_between_ranks_is_refused() -> None:
    torch.manual_seed(this_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(this_device())
    with new_directory() as directory:
        with raises_soon(
            SaveError, "0.weight is a parameter that is not sharded, and its values differ between rank 0"
        ):
            save_full_tensors(model, directory, names="model")
        together()
        assert not directory.exists()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        model[1].running_mean += this_rank()
        together()
        with pytest.warns(BuffersDiffer, match=r"1\.running_mean is a buffer"):
            report = save_full_tensors(model, directory, names="model")
        assert report.differing_buffers == ("1.running_mean",)
        together()
        saved = load_file(directory / "model.safetensors")
        assert torch.equal(saved["0.weight"], model[0].weight.cpu())


@everywhere
def test_a_directory_in_use_is_left_alone() -> None:
    model, _ = sharded_net()
    with new_directory() as directory:
        directory.mkdir(exist_ok=True)
        with (directory / ".fsdp-doctor-save.lock").open("wb") as lock:
            if this_rank() == 0:
                fcntl.flock(lock, fcntl.LOCK_EX)
            together()
            with raises_soon(SaveError, "another save is writing"):
                save_full_tensors(model, directory, names="model")
            together()
            assert [*contents(directory)] == [".fsdp-doctor-save.lock"]
            together()
        # What a save left whose ranks were killed.
        (directory / ".fsdp-doctor-save-0").mkdir(exist_ok=True)
        (directory / ".fsdp-doctor-save-0" / "model.safetensors").touch()
        together()
        if this_rank() == 0:
            assert "unfinished" in {finding.trouble for finding in verify(directory).findings}
        together()
        save_full_tensors(model, directory, names="model")
        assert sorted(os.listdir(directory)) == ["fsdp-doctor.json", "model.safetensors"]


@everywhere
def test_a_file_that_has_no_room_is_found_before_anything_is_written() -> None:
    model, _ = sharded_net()
    with new_directory() as directory:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # 97 % of the weights would be written before a write fails.
        size = sum(tensor.nbytes for tensor in tensors_of(new_net()).values())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 97 // 100, limits[1]))
        try:
            with mock.patch.object(Writer, "write", side_effect=AssertionError), raises_soon(SaveError, "has no room"):
                save_full_tensors(model, directory, names="model")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        together()
        assert not contents(directory)


def _save_until_killed(directory: pathlib.Path) -> None:
    """Rank 1 is killed when it has written its rows."""
    dist.init_process_group("gloo")
    model = fsdp2_on_the_cpu()
    save_full_tensors(model, directory, names="model", step=1)

    def die(_: Writer) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        Writer.finish = die  # type: ignore[method-assign]
    try:
        save_full_tensors(model, directory, names="model", step=2, overwrite=True)
    except SaveError as error:
        print(f"refused: {error}", flush=True)
    os._exit(0)


def fsdp2_on_the_cpu() -> nn.Module:
    os.environ["FSDP_DOCTOR_TEST_DEVICE"] = "cpu"
    return fsdp2(new_net())


def test_a_rank_that_dies_in_a_save_is_named_on_the_others(
    tmp_path: pathlib.Path,
) -> None:
    with forked.job(_save_until_killed, [(tmp_path / "saved",)] * 3) as started:
        for process in started.ranks:
            process.join(120)
        assert [process.exitcode for process in started.ranks] == [0, -signal.SIGKILL, 0], started.printed()
        assert started.printed().count("refused: the process of rank 1 has ended") == 2
    assert sorted(contents(tmp_path / "saved")) == ["fsdp-doctor.json", "model.safetensors"]
    assert json.loads((tmp_path / "saved/fsdp-doctor.json").read_text())["step"] == 1
    done = doctor("checkpoint", "verify", str(tmp_path / "saved"))
    assert done.stdout.startswith("sound"), done.stdout


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "a bit of a tensor": (lambda path: _flip(path / "model.safetensors"), "checksum"),
    "a byte of the header": (
        lambda path: (path / "model.safetensors").write_bytes(
            (path / "model.safetensors").read_bytes().replace(b'"a.weight"', b'"b.weight"')
        ),
        "checksum",
    ),
    "a lost file": (lambda path: (path / "model.safetensors").unlink(), "missing_file"),
    "a half marker": (
        lambda path: (path / "fsdp-doctor.json").write_text('{"format": "fsdp-doctor save"}'),
        "settings",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_change_of_what_was_saved_is_found_by_the_marker(tmp_path: pathlib.Path, name: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 64)})
    save_full_tensors(model, tmp_path, names="model")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a.weight"], model["a"].weight)
    assert verify(tmp_path).answer == "sound"
    damage, trouble = DAMAGES[name]
    damage(tmp_path)
    found = verify(tmp_path)
    assert found.answer == "damaged"
    assert any(finding.trouble.startswith(trouble) for finding in found.findings), found.to_text()
