"""``fsdp-doctor checkpoint convert``: any format as Hugging Face files, bit by bit, or nothing at all."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from program import doctor, run
from safetensors.torch import load_file, save_file
from support import saved_checkpoints as saved
from support.forked import run_script
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.target_directory import RECORD, ConversionError
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.names import read_hub_parts

HF, DCP, FSDP2 = ConversionTarget.HF, ConversionTarget.DCP, ConversionTarget.FSDP2
BY_RANKS = (
    "verl",
    "dcp",
    "async",
    "torchtitan",
    "threads",
    "files",
    "alone",
    "accelerate",
    "dcp_safetensors",
    "shards",
)


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
    convert(originals / "columns", tmp_path / "torch", ConversionTarget.TORCH)
    assert verify(tmp_path / "torch").answer == "sound"
    assert are_equal(torch.load(tmp_path / "torch" / "pytorch_model_fsdp.bin"), expected)
    mixed = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.randn(5).bfloat16(),
        "c": torch.arange(7),
        "d": torch.ones(()),
    }
    torch.save(mixed | {"e": torch.empty(0, 4), "_orig_mod.f": torch.ones(2)}, tmp_path / "mixed.pt")
    done = convert(tmp_path / "mixed.pt", tmp_path / "mixed", HF)
    assert are_equal(tensors_in(tmp_path / "mixed"), mixed | {"e": torch.empty(0, 4), "f": torch.ones(2)})
    assert done.names == [("_orig_mod.f", "f")]


def test_a_tied_head_is_written_once(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A head that shares the embedding's memory, or is a copy of it, is left out; one that differs is not."""
    state = load_file(originals / "tied" / "model.safetensors")
    head = state["model.embed_tokens.weight"]
    for name, of_head in (("shared", head), ("copied", head.clone()), ("other", head + 1)):
        (tmp_path / name).mkdir()
        shutil.copy(originals / "tied" / "config.json", tmp_path / name)
        torch.save(state | {"lm_head.weight": of_head}, tmp_path / name / "pytorch_model.bin")
        done = convert(tmp_path / name, tmp_path / "out" / name, HF)
        assert bool(done.files) is (name != "other")
        assert name == "other" or are_equal(tensors_in(tmp_path / "out" / name), state)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "llama-tied", "qwen2-vl"])
def test_hub_files_get_the_hubs_names_and_others_the_models(tmp_path: pathlib.Path, family: str) -> None:
    """Fused experts as tensors of their own, and back: what save_pretrained writes, and from_pretrained reads."""
    families = pytest.importorskip("support.families")
    model = families.new_family(family)
    hub, saved_by_job = tmp_path / "hub", tmp_path / "job"
    model.save_pretrained(hub, max_shard_size="20KB")
    expected = model.state_dict()
    torch.save(expected, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", saved_by_job, DCP, world_size=3)
    model.config.save_pretrained(saved_by_job)
    convert(saved_by_job, tmp_path / "exported", HF, find_parts=read_hub_parts)
    assert are_equal(tensors_in(tmp_path / "exported"), tensors_in(hub))
    convert(hub, tmp_path / "ranks", FSDP2, world_size=3, find_parts=read_hub_parts)
    of_rank = torch.load(tmp_path / "ranks" / "model_world_size_3_rank_1.pt", weights_only=True)
    assert {name for name, tensor in of_rank.items() if isinstance(tensor, DTensor)} == of_rank.keys()
    convert(tmp_path / "ranks", tmp_path / "whole", ConversionTarget.TORCH, find_parts=read_hub_parts)
    whole = torch.load(tmp_path / "whole" / "pytorch_model_fsdp.bin", weights_only=True)
    tied = {"lm_head.weight"} if family == "llama-tied" else set()
    assert are_equal(whole, {name: expected[name] for name in expected.keys() - tied})
    convert(tmp_path / "ranks", tmp_path / "again", HF, find_parts=read_hub_parts, largest_file=20_000)
    loaded = type(model).from_pretrained(tmp_path / "again", dtype="auto")
    assert are_equal(dict(loaded.state_dict()), expected)


def test_names_are_refused_that_the_configuration_does_not_explain(tmp_path: pathlib.Path) -> None:
    model = pytest.importorskip("support.families").new_family("qwen3-moe")
    model.config.architectures = [type(model).__name__]
    state = model.state_dict()
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    for name, changed in (("other", {fused: state[fused][:3]}), ("own", {})):
        (tmp_path / name).mkdir()
        torch.save(state | changed, tmp_path / name / "model.pt")
        model.config.save_pretrained(tmp_path / name)
    with pytest.raises(ConversionError, match=fused):
        convert(tmp_path / "other", tmp_path / "out", HF, find_parts=read_hub_parts)
    command = ("checkpoint", "convert", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "hf")
    done = doctor(*command, "--config", str(tmp_path))
    assert (done.code, "--keep-names" in done.stderr) == (2, True), done.stderr
    done = doctor(*command)
    assert (done.code, "model.layers.1.mlp.experts.3.up_proj.weight" in tensors_in(tmp_path / "out")) == (0, True), (
        done.stderr
    )
    (tmp_path / "out" / "model.safetensors").unlink()
    lacking = {name: tensor for name, tensor in state.items() if ".1." not in name} | {
        "model.layers.1.mlp.experts.0.up_proj.weight": torch.ones(16, 32)
    }
    save_file(lacking, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ConversionError, match="lacks"):
        convert(tmp_path / "out", tmp_path / "again", DCP, find_parts=read_hub_parts)


def test_the_class_comes_from_the_model_type_or_nothing_is_written(tmp_path: pathlib.Path) -> None:
    """The configuration is saved without architectures, and once has a type that transformers lacks."""
    model = pytest.importorskip("support.families").new_family("qwen3-moe")
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / "job")
    torch.save(model.state_dict(), tmp_path / "job" / "model.pt")
    command = ("checkpoint", "convert", str(tmp_path / "job"), str(tmp_path / "out"), "--to", "hf")
    assert (done := doctor(*command)).code == 0, done.stderr
    model.save_pretrained(tmp_path / "hub")
    assert are_equal(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "hub"))
    shutil.rmtree(tmp_path / "out")
    saved.edit_json(tmp_path / "job" / "config.json", model_type="ours")
    done = doctor(*command)
    assert (done.code, "--keep-names" in done.stderr, (tmp_path / "out").exists()) == (2, True, False), done.stderr
    (tmp_path / "job" / "config.json").unlink()
    done = doctor(*command)
    assert (done.code, "no config.json" in done.stderr) == (0, True), done.stderr
    assert "--overwrite and --config DIR" in done.stderr
    done = doctor(*command, "--overwrite", "--config", str(tmp_path / "hub"))
    assert (done.code, "no config.json" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "out" / "config.json").is_file()


def test_of_a_damaged_checkpoint_nothing_is_written(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "dcp", tmp_path / "dcp")
    saved.flip(tmp_path / "dcp" / "__1_0.distcp", 100_000)
    done = doctor("checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--to", "hf")
    assert (done.code, "checksum" in done.stdout) == (1, True), done.stderr
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    assert convert(tmp_path / "dcp", tmp_path / "out", HF).verification.answer == "damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_a_directory_that_exists_is_replaced_only_when_asked(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(originals / "columns", tmp_path / "out", DCP)
    with pytest.raises(ConversionError, match="exists"):
        convert(originals / "columns", tmp_path / "out", HF)
    assert (tmp_path / "out" / ".metadata").exists()
    convert(originals / "columns", tmp_path / "out", HF, overwrite=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", RECORD}
    (tmp_path / "empty").mkdir()
    convert(originals / "columns", tmp_path / "empty", HF, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "empty"}


def list_all(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make_run(directory: pathlib.Path) -> pathlib.Path:
    """Writes two steps, the first with links to files elsewhere, the second with a file alone; and notes."""
    for name in ("run/step-1", "run/step-2", "blobs", "other"):
        (directory / name).mkdir(parents=True)
    torch.save({"a.weight": torch.ones(4, 4)}, directory / "blobs" / "0")
    (directory / "run/step-1/pytorch_model.bin").symlink_to(directory / "blobs" / "0")
    torch.save({"a.weight": torch.ones(4, 4)}, directory / "run/step-2/model.pt")
    (directory / "run" / "notes.txt").write_text("mine")
    (directory / "linked").symlink_to("run")
    return directory


# SOURCE and TARGET, of a conversion that would remove or change what it reads.
OVER_ITSELF = {
    "itself": ("run/step-1", "run/step-1"),
    "the directory above": ("run/step-1", "run"),
    "the directory above, by dots": ("run/step-1", "run/step-2/.."),
    "the directory above, through a link": ("run/step-1", "linked"),
    "itself, through a link": ("linked/step-1", "run/step-1"),
    "a directory in it": ("run/step-1", "run/step-1/out"),
    "a directory in it, through a link": ("linked", "run/out"),
    "the directory of a file": ("run/step-2/model.pt", "run/step-2"),
    "the file": ("run/step-2/model.pt", "run/step-2/model.pt"),
    "the directory of the links' files": ("run/step-1", "blobs"),
}


@pytest.mark.parametrize("case", OVER_ITSELF)
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_nothing_that_is_read_is_replaced(tmp_path: pathlib.Path, case: str, options: tuple[str, ...]) -> None:
    source, target = OVER_ITSELF[case]
    before = list_all(make_run(tmp_path))
    done = doctor("checkpoint", "convert", f"{tmp_path}/{source}", f"{tmp_path}/{target}", "--to", "torch", *options)
    assert done.code == 2, done.stderr
    assert list_all(tmp_path) == before
    assert not list(tmp_path.rglob("*.lock"))


def test_only_what_a_conversion_wrote_is_replaced(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file of the user's, one that was changed, a link, a file for a directory, what another program left aside."""
    out = tmp_path / "out"

    def change() -> None:
        stale = out / "model.safetensors"
        data = stale.read_bytes()
        stale.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    ways = {
        "new": lambda: (out / "notes.txt").write_text("mine"),
        "below": lambda: ((out / "logs").mkdir(), (out / "logs" / "0").write_text("mine")),
        "link": lambda: (out / "linked").symlink_to(originals),
        "changed": change,
        "no record": lambda: (out / RECORD).unlink(),
        "file": lambda: (shutil.rmtree(out), out.write_text("mine")),
        "other": lambda: (shutil.rmtree(out), (tmp_path / ".out.old").mkdir(), (tmp_path / ".out.old" / "a").touch()),
        "partial": lambda: ((tmp_path / ".out.partial").mkdir(), (tmp_path / ".out.partial" / "a").touch()),
    }
    for name, use in ways.items():
        convert(originals / "columns", out, HF)
        use()
        before = list_all(tmp_path)
        with pytest.raises(ConversionError):
            convert(originals / "columns", out, HF, overwrite=True)
        assert list_all(tmp_path) == before, name
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_file_that_comes_meanwhile_is_not_removed(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(originals / "columns", tmp_path / "out", HF)
    with pytest.raises(ConversionError, match="mine"):
        convert(
            originals / "dcp",
            tmp_path / "out",
            HF,
            overwrite=True,
            progress=lambda *_: (tmp_path / "out" / "mine").touch(),
        )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", RECORD, "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


_STUCK = """
import pathlib, sys, threading
from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget

def stop(done, total):
    if done > total // 2:
        print("half", flush=True)
        threading.Event().wait()

convert(*map(pathlib.Path, sys.argv[1:3]), ConversionTarget.HF, overwrite=True, progress=stop)
"""


def test_an_interruption_leaves_nothing_and_a_kill_what_the_next_conversion_removes(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(originals / "dcp", out, HF, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    convert(originals / "columns", out, HF)
    older = (out / "model.safetensors").read_bytes()
    command = [sys.executable, "-c", _STUCK, str(originals / "dcp"), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        try:
            assert killed.stdout is not None
            assert killed.stdout.readline() == b"half\n"
        finally:
            killed.kill()
    assert (out / "model.safetensors").read_bytes() == older
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial", ".out.lock"}
    # As a kill between the two renames would leave it.
    out.rename(tmp_path / ".out.old")
    with pytest.raises(ConversionError, match="exists"):
        convert(originals / "dcp", out, HF)
    assert (out / "model.safetensors").read_bytes() == older
    convert(originals / "dcp", out, HF, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(tensors_in(out)) > 2


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
    with pytest.raises(ConversionError, match="does not contain the written data"):
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
    """The way back leads to Hugging Face files; the optimizer is converted where there is one."""
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


@pytest.mark.parametrize("writer", ["trainer", "accelerate"])
def test_a_numbered_optimizer_is_named_by_the_class_of_the_config(tmp_path: pathlib.Path, writer: str) -> None:
    """Numbers are in both files, and the model's is sorted by name: the moments are compared with the live ones."""
    saved_in, model, optimizer = _SAVE_NUMBERED[writer](tmp_path / "job")
    shutil.copytree(saved_in, tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "saved")
    done = doctor("checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "torch")
    assert done.code == 0, str(done)
    state = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)["state"]
    live = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    assert len({moments.norm().item() for moments in live.values()}) == len(live)
    assert are_equal({name: slots["exp_avg"] for name, slots in state.items()}, live)
    # Other shapes in the config are another class: refused, and no moment gets a neighbour's name.
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(settings | {"model_type": "mine"}))
    done = doctor("checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "no"), "--to", "torch")
    assert (done.code, "--no-optimizer" in done.stderr) == (2, True), str(done)


def _make_with_biases() -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=40, num_hidden_layers=2, tie_word_embeddings=True, **sizes))


def _save_by_trainer(directory: pathlib.Path) -> tuple[pathlib.Path, Qwen2ForCausalLM, torch.optim.Optimizer]:
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(_make_with_biases(), arguments, train_dataset=data)
    trainer.train()
    return directory / "checkpoint-2", trainer.model, trainer.optimizer.optimizer


def _save_by_accelerate(directory: pathlib.Path) -> tuple[pathlib.Path, Qwen2ForCausalLM, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = _make_with_biases()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss)
    optimizer.step()
    accelerator.save_state(str(directory))
    return directory, model, optimizer.optimizer


_SAVE_NUMBERED = {"trainer": _save_by_trainer, "accelerate": _save_by_accelerate}

_BOUNDED = """
import pathlib, re, resource, sys, threading
from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget
threading.stack_size(1 << 20)
(pages, *_) = pathlib.Path("/proc/self/statm").read_text().split()
limit = int(pages) * resource.getpagesize() + (30 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = convert(*map(pathlib.Path, sys.argv[1:3]), ConversionTarget(sys.argv[3]), world_size=3)
(peak,) = re.findall(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
print("torch" in sys.modules, found.verification.answer, found.num_bytes >> 20, int(peak) < 64 << 10)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """40 MiB, and an optimizer of as many."""
    directory = tmp_path_factory.mktemp("large")
    rows = torch.randn(10 << 10, 1 << 10)
    optimizer = {"state": {"large": {"exp_avg": rows.square()}}, "param_groups": [{"lr": 0.1, "params": ["large"]}]}
    torch.save({"model": {"large": rows}, "optimizer": optimizer}, directory / "model.pt")
    return directory / "model.pt"


@pytest.mark.parametrize("to", ConversionTarget)
def test_thirty_mebibytes_suffice_for_any_size(large: pathlib.Path, tmp_path: pathlib.Path, to: str) -> None:
    done = run(sys.executable, "-c", _BOUNDED, str(large), str(tmp_path / "out"), ConversionTarget(to).value)
    size = 40 if to is HF else 80
    assert done.stdout == f"False sound {size} True\n", done.stderr
    shutil.rmtree(tmp_path / "out")
