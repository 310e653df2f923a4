"""``fsdp-doctor checkpoint convert``: any format as Hugging Face files, bit by bit, or nothing at all."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil
import sys

import pytest
import torch
from program import doctor, run
from safetensors.torch import load_file
from support import saved_checkpoints as saved
from support.forked import run_script
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.copying import ConversionError
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify

HF, DCP, FSDP2 = ConversionTarget.HF, ConversionTarget.DCP, ConversionTarget.FSDP2
BY_RANKS = ("verl", "dcp", "torchtitan", "threads", "files", "alone", "accelerate", "dcp_safetensors", "shards")


def tensors_in(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


@pytest.mark.parametrize("largest_file", [5 << 30, 150_000])
def test_every_format_is_the_same_model_as_hugging_face_files(
    originals: pathlib.Path, tmp_path: pathlib.Path, largest_file: int
) -> None:
    expected = torch.load(originals / "whole" / "pytorch_model_fsdp.bin")
    for name in BY_RANKS:
        done = convert(originals / name, tmp_path / name, HF, largest_file=largest_file)
        assert are_equal(tensors_in(tmp_path / name), expected), name
        assert (len(done.files) > 1) is (largest_file < 1 << 20)
        assert verify(tmp_path / name).answer == "sound"
    shutil.copy(originals / "verl" / "huggingface" / "config.json", tmp_path / "dcp")
    for name in ("verl", "dcp"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert are_equal(dict(loaded.state_dict()), expected)


def test_columns_of_each_rank_and_dtypes_of_all_sizes_are_put_together(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(1)
    expected = {"columns": torch.randn(40, 51), "row": torch.randn(1, 7)}
    for name in ("columns", "item"):
        convert(originals / name, tmp_path / name, HF)
        assert are_equal(tensors_in(tmp_path / name), expected)
    mixed = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.randn(5).bfloat16(),
        "c": torch.arange(7),
        "d": torch.ones(()),
    }
    torch.save(mixed | {"e": torch.empty(0, 4), "_orig_mod.f": torch.ones(2)}, tmp_path / "mixed.pt")
    done = convert(tmp_path / "mixed.pt", tmp_path / "mixed", HF)
    assert are_equal(tensors_in(tmp_path / "mixed"), mixed | {"e": torch.empty(0, 4), "f": torch.ones(2)})
    assert done.names == {"_orig_mod.f": "f"}


def test_a_tied_head_is_written_once(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state = load_file(originals / "tied" / "model.safetensors")
    (tmp_path / "tied").mkdir()
    shutil.copy(originals / "tied" / "config.json", tmp_path / "tied")
    torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, tmp_path / "tied" / "pytorch_model.bin")
    convert(tmp_path / "tied", tmp_path / "out", HF)
    assert are_equal(tensors_in(tmp_path / "out"), state)


def test_of_a_damaged_checkpoint_nothing_is_written(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "dcp", tmp_path / "dcp")
    saved.flip(tmp_path / "dcp" / "__1_0.distcp", 100_000)
    done = doctor("checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--to", "hf")
    assert (done.code, "checksum" in done.stdout) == (1, True), done.stderr
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    assert convert(tmp_path / "dcp", tmp_path / "out", HF).verification.answer == "damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_a_directory_that_exists_is_replaced_only_when_asked(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConversionError, match="exists"):
        convert(originals / "columns", tmp_path / "out", HF)
    assert (tmp_path / "out" / "mine.txt").exists()
    convert(originals / "columns", tmp_path / "out", HF, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interruption_leaves_nothing_and_what_a_kill_left_is_removed(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(originals / "dcp", tmp_path / "out", HF, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".out.lock").touch()
    convert(originals / "columns", tmp_path / "out", HF)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_conversions_do_not_write_the_same_directory(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with open(tmp_path / ".out.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another conversion"):
            convert(originals / "columns", tmp_path / "out", HF)


def test_what_was_written_is_compared_with_what_was_read(
    originals: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is lost: the disk says that it was done."""
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: len(data) if at > 50_000 else whole(fd, data, at))
    with pytest.raises(ConversionError, match="did not keep what was written"):
        convert(originals / "dcp", tmp_path / "out", HF)
    assert list(tmp_path.iterdir()) == []


def test_a_job_changes_its_strategy_and_continues_as_it_would_have(tmp_path: pathlib.Path) -> None:
    """FSDP1 to FSDP2 and back, through DCP and through whole tensors: the next step is the same, bit by bit."""
    job = pathlib.Path(saved.__file__).with_name("converted_by_ranks.py")
    done = run_script(job, arguments=["save", str(tmp_path)])
    assert done.codes == [0, 0], done.output
    of_optimizer = []
    for source, target in (("fsdp1", "fsdp2"), ("fsdp2", "again"), ("again", "dcp"), ("dcp", "torch")):
        to = ConversionTarget.FSDP1 if target == "again" else ConversionTarget(target)
        of_optimizer.append(convert(tmp_path / source, tmp_path / target, to, device="emulated").has_optimizer)
        assert verify(tmp_path / target).answer == "sound"
    assert all(of_optimizer)
    done = run_script(job, arguments=["load", str(tmp_path), "fsdp1", "fsdp2", "again", "dcp", "torch"])
    assert done.codes == [0, 0], done.output
    assert (done.output.count(": True\n"), ": False" in done.output) == (7, False), done.output
    # Another number of ranks: that of the files of ranks is to be named.
    convert(tmp_path / "torch", tmp_path / "three" / "fsdp2", FSDP2, world_size=3, device="emulated", buffers=["scale"])
    for name in ("dcp", "states.pt"):
        (tmp_path / "three" / name).symlink_to(tmp_path / name)
    done = run_script(job, ranks=3, arguments=["load", str(tmp_path / "three"), "fsdp2", "dcp"])
    assert done.codes == [0, 0, 0], done.output
    assert (done.output.count(": True\n"), ": False" in done.output) == (3, False), done.output


@pytest.mark.parametrize("name", [*BY_RANKS, "full", "lightning", "bin", "hub"])
def test_every_format_is_the_same_as_dcp_and_as_files_of_torch(
    originals: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    """And back as Hugging Face files; with the optimizer, where there is one."""
    dcp, whole, again = (tmp_path / each for each in ("dcp", "torch", "again"))
    convert(originals / name, dcp, DCP)
    done = convert(dcp, whole, ConversionTarget.TORCH)
    convert(whole, again, DCP, world_size=3)
    for target in (dcp, whole, again):
        assert verify(target).answer == "sound"
    weights = torch.load(whole / "pytorch_model_fsdp.bin", weights_only=True)
    convert(originals / name, tmp_path / "expected", HF)
    convert(again, tmp_path / "hub", HF)
    assert are_equal(tensors_in(tmp_path / "hub"), weights)
    assert are_equal(tensors_in(tmp_path / "expected"), weights)
    dcp_to_torch_save(again, tmp_path / "by_torch.pt")
    read = torch.load(tmp_path / "by_torch.pt")
    assert are_equal(read["model"], weights)
    if done.has_optimizer:
        state = torch.load(whole / "optimizer.bin", weights_only=True)
        assert are_equal(flatten(read["optim"]["state"]), flatten(state["state"]))
        assert read["optim"]["param_groups"] == state["param_groups"]
        assert state["state"].keys() == set(state["param_groups"][0]["params"]) == weights.keys()


def flatten(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}.{slot}": tensor for name, slots in state.items() for slot, tensor in slots.items()}


def test_weights_are_cast_as_torch_casts_them_and_the_optimizer_is_not(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = torch.load(originals / "whole" / "pytorch_model_fsdp.bin")
    convert(originals / "verl", tmp_path / "out", ConversionTarget.TORCH, dtype="bfloat16")
    weights = torch.load(tmp_path / "out" / "pytorch_model_fsdp.bin")
    assert are_equal(weights, {name: tensor.bfloat16() for name, tensor in expected.items()})
    state = torch.load(tmp_path / "out" / "optimizer.bin")["state"]
    assert {slots["exp_avg"].dtype for slots in state.values()} == {torch.float32}


def test_what_is_not_known_is_asked_for(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The number of ranks, and which parameters an optimizer of two groups numbers."""
    with pytest.raises(ConversionError, match="--world-size"):
        convert(originals / "hub", tmp_path / "out", FSDP2)
    with pytest.raises(ConversionError, match="--no-optimizer"):
        convert(originals / "trainer", tmp_path / "out", DCP)
    assert not convert(originals / "trainer", tmp_path / "out", DCP, with_optimizer=False).has_optimizer


_BOUNDED = """
import pathlib, resource, sys, threading
from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget
threading.stack_size(1 << 20)
(pages, *_) = pathlib.Path("/proc/self/statm").read_text().split()
limit = int(pages) * resource.getpagesize() + (30 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = convert(*map(pathlib.Path, sys.argv[1:3]), ConversionTarget(sys.argv[3]))
print("torch" in sys.modules, found.verification.answer, found.num_bytes >> 20)
"""


def test_thirty_mebibytes_suffice_for_any_size(tmp_path: pathlib.Path) -> None:
    torch.save({"large": torch.randn(1 << 10, 25 << 10).T.contiguous()}, tmp_path / "model.pt")
    done = run(sys.executable, "-c", _BOUNDED, str(tmp_path / "model.pt"), str(tmp_path / "out"), "hf")
    assert done.stdout == "False sound 100\n", done.stderr
    assert json.loads((tmp_path / "out" / "model.safetensors").read_bytes()[8:200].split(b"}}")[0] + b"}}")["large"]
