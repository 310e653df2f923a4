"""Directories that nobody should convert: each ends in bounded time, with one sentence, and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import sys
import zipfile
from typing import Any

import pytest
import torch
from program import run
from safetensors.torch import save_file
from support import saved_checkpoints as saved
from support.inside import doctor

from fsdp_doctor.checkpoints import targets
from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.files import OpenFile
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor
from fsdp_doctor.checkpoints.target_directory import ConversionError
from fsdp_doctor.checkpoints.targets import ConversionTarget, StatesToWrite, TensorToWrite
from fsdp_doctor.checkpoints.torch_files import find_tensors, read_torch_file
from fsdp_doctor.checkpoints.verification import verify


def test_a_directory_in_which_a_save_is_running_is_not_converted(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A file is written anew after it was opened; and a file that the metadata names is not there yet."""
    shutil.copytree(originals / "dcp", tmp_path / "dcp")
    file = tmp_path / "dcp" / "__1_0.distcp"
    data = file.read_bytes()

    def save_again(done: int, total: int) -> None:
        file.write_bytes(data)

    done = convert(tmp_path / "dcp", tmp_path / "out", ConversionTarget.TORCH, progress=save_again)
    assert done.verification.answer == "cannot be judged"
    file.unlink()
    assert convert(tmp_path / "dcp", tmp_path / "out", ConversionTarget.TORCH).verification.answer == "damaged"
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


_AS_ANOTHER_USER = """
import os, pathlib, sys
from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify
path = pathlib.Path("checkpoint")
assert verify(path).answer == "sound"
os.chmod(path / "model.safetensors", 0)
os.chmod("closed", 0o700)
if os.geteuid() == 0:
    os.seteuid(65534)
found = verify(path)
done = convert(path, pathlib.Path("open/out"), ConversionTarget.HF)
print(found.answer, [finding.file for finding in found.findings], done.files)
try:
    convert(pathlib.Path("sound"), pathlib.Path("closed/out"), ConversionTarget.HF)
except PermissionError as error:
    print(error.strerror)
"""


def test_another_user_s_files_are_named_and_not_judged(tmp_path: pathlib.Path) -> None:
    for name in ("checkpoint", "sound", "closed"):
        (tmp_path / name).mkdir()
        save_file({"a": torch.ones(3, 3)}, tmp_path / name / "model.safetensors")
    save_file({"a": torch.ones(3, 3)}, tmp_path / "sound" / "model.safetensors")
    tmp_path.chmod(0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = run(sys.executable, "-c", _AS_ANOTHER_USER, cwd=tmp_path)
    expected = ["cannot be judged ['model.safetensors'] []"] + (["Permission denied"] if os.geteuid() == 0 else [])
    assert done.stdout.splitlines()[: len(expected)] == expected, done.stderr


@pytest.mark.parametrize("to", list(ConversionTarget))
def test_a_disk_that_is_full_ends_it_before_or_while_it_writes(
    originals: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, to: ConversionTarget
) -> None:
    whole, written = os.pwrite, 0
    source = originals / "verl"
    size = sum(file.stat().st_size for file in source.iterdir() if file.is_file())

    def fill(fd: int, data: Any, place: int) -> int:
        nonlocal written
        written += len(data)
        if written > 0.3 * size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(fd, data, place)

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(ConversionError, match="No space left on device"):
        convert(source, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []

    class Room:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Room)
    with pytest.raises(ConversionError, match="4096 bytes left"):
        convert(source, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []


def test_metadata_and_indexes_that_leave_the_directory_are_not_followed(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "columns", tmp_path / "columns" / "inside")
    for file in (tmp_path / "columns" / "inside").glob("*.distcp"):
        file.rename(tmp_path / "columns" / file.name)

    def leave(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    saved.edit_metadata(tmp_path / "columns" / "inside", leave)
    assert not convert(tmp_path / "columns" / "inside", tmp_path / "out", ConversionTarget.TORCH).files
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "hub").mkdir()
    index = {"weight_map": {"a": "../model.safetensors"}}
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not convert(tmp_path / "hub", tmp_path / "out", ConversionTarget.TORCH).files


def test_a_link_to_a_directory_is_not_followed(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "linked").symlink_to(originals / "hub")
    found = verify(tmp_path / "checkpoint")
    assert (found.answer, found.num_tensors) == ("cannot be judged", 0)


def test_a_hundred_thousand_files_are_passed_over(tmp_path: pathlib.Path) -> None:
    (tmp_path / "many").mkdir()
    save_file({"a": torch.ones(3, 3)}, tmp_path / "many" / "model.safetensors")
    for number in range(100_000):
        os.mknod(tmp_path / "many" / f"{number}.log")
    assert convert(tmp_path / "many", tmp_path / "out", ConversionTarget.TORCH).verification.num_tensors == 1


def test_an_index_of_fifty_megabytes_is_read(tmp_path: pathlib.Path) -> None:
    """Each of the names that no file has is found, too."""
    weight_map = {f"layers.{number}.{'x' * 500}": "model.safetensors" for number in range(100_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"a": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").stat().st_size > 50e6
    done = doctor("checkpoint", "verify", str(tmp_path))
    assert (done.code, len(done.stdout.splitlines()) < 30) == (1, True)


def test_a_file_with_more_than_four_gigabytes_is_one_that_torch_reads(tmp_path: pathlib.Path) -> None:
    """The file has holes: places behind them and their length need 64 bits."""
    large, small = (
        TensorToWrite(
            SavedTensor((name,), "uint8", (count,), [SavedPiece("f", at, (count,), (0,), (1,))]), "uint8", False
        )
        for name, count, at in (("large", 5 << 30, 0), ("small", 9, 5 << 30))
    )
    plan = targets.lay_out(ConversionTarget.TORCH, StatesToWrite({"large": large, "small": small}, None), 1, 1, "cpu")
    (file,) = plan.files
    try:
        with open(tmp_path / file.name, "wb") as stream:
            stream.truncate(file.nbytes)
            for offset, text in [each for archive in file.archives for each in archive.encode()]:
                stream.seek(offset)
                stream.write(text)
            stream.seek(plan.slots[id(small)][1][0].places[0].begin)
            stream.write(b"123456789")
    except OSError:
        pytest.skip("the file system takes no file of 5 GiB")
    sizes = {entry.filename: entry.file_size for entry in zipfile.ZipFile(tmp_path / file.name).infolist()}
    assert sizes["pytorch_model_fsdp/data/0"] == 5 << 30
    with OpenFile(tmp_path / file.name) as opened:
        assert [tensor.shape for tensor in find_tensors("f", read_torch_file(opened)).tensors] == [(5 << 30,), (9,)]
    loaded = torch.load(tmp_path / file.name, weights_only=True, mmap=True)
    assert (loaded["large"].shape, bytes(loaded["small"].tolist())) == ((5 << 30,), b"123456789")
