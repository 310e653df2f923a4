"""The model is found wherever it lies in a checkpoint, and what may be another one is not taken for it."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from program import doctor
from safetensors.torch import load_file, save_file
from support import saved_checkpoints as saved
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.target_directory import ConversionError
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.fingerprints import FingerprintError, fingerprint_checkpoint

CONFIG = LlamaConfig(**saved.SIZES, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])


def save(state: dict[str, Any], directory: pathlib.Path, *, as_file: bool) -> None:
    """Saves as DCP, or as a file of torch.save; with a config.json."""
    directory.mkdir()
    if as_file:
        torch.save(state, directory / "last.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            dcp.save(state, checkpoint_id=directory, no_dist=True)
    CONFIG.save_pretrained(directory)


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights and the optimizer's state by names, after a step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def average(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.5 for name, tensor in weights.items()}


def compile_names(weights: dict[str, torch.Tensor], prefix: str = "_orig_mod.") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


# What the training program puts around the weights and the optimizer.
AROUND: dict[str, Any] = {
    "RLinf": lambda w, o: {"fsdp_checkpoint": {"model": w, "optimizers": o}},
    "slime": lambda w, o: {"model_state": {"model": w}},
    "an average beside it": lambda w, o: {"state": {"model": w, "ema": average(w)}, "optimizer": o},
    "an average at the top": lambda w, o: {"model": w, "ema": average(w)},
    "model_state_dict": lambda w, o: {"model_state_dict": w, "optimizer_state_dict": o, "epoch": 3},
    "any one key": lambda w, o: {"policy": w},
    "torch.compile": lambda w, o: {"model": compile_names(w)},
    "DDP": lambda w, o: compile_names(w, "module."),
    "torch.compile below DDP": lambda w, o: {"model": compile_names(w, "module._orig_mod.")},
    "a smaller one beside it": lambda w, o: {"policy": w, "draft": {n: t for n, t in w.items() if ".2." not in n}},
}


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_the_model_is_found_and_written_under_its_own_names(
    trained: tuple[Any, Any], tmp_path: pathlib.Path, name: str, as_file: bool
) -> None:
    weights, optimizer = trained
    state = AROUND[name](weights, optimizer)
    save(state, tmp_path / "source", as_file=as_file)
    found = verify(tmp_path / "source")
    is_wrapped = name == "DDP" or "compile" in name
    troubles = saved.list_troubles(found) | saved.list_troubles(found, "warning")
    assert troubles <= ({"prefix", "wrapped"} if is_wrapped else set()), found.to_text()
    done = convert(tmp_path / "source", tmp_path / "out", ConversionTarget.HF)
    assert done.files, done.verification.to_text()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[key], weights[key]) for key in weights)
    assert bool(done.left_out) is ("beside" in name or "top" in name), done.left_out


def test_prefixes_in_files_of_the_hub_are_taken_off(trained: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    """Names of torch.compile in model.safetensors are damage; a conversion cures it, as the remedy says."""
    weights, _ = trained
    (tmp_path / "hub").mkdir()
    save_file(compile_names(weights), tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    CONFIG.save_pretrained(tmp_path / "hub")
    found = verify(tmp_path / "hub")
    assert saved.list_troubles(found) == {"prefix"}, found.to_text()
    assert f"checkpoint convert {tmp_path / 'hub'} " in found.findings[0].remedy
    assert convert(tmp_path / "hub", tmp_path / "out", ConversionTarget.HF).files
    LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("keys", [("student", "teacher"), ("actor.model", "critic.model")])
def test_two_that_may_be_the_model_are_named_and_one_is_chosen(
    trained: tuple[Any, Any], tmp_path: pathlib.Path, keys: tuple[str, str]
) -> None:
    weights, _ = trained
    state: dict[str, Any] = {}
    for key, part in zip(keys, (weights, average(weights)), strict=True):
        outer, _, inner = key.partition(".")
        state[outer] = {inner: part} if inner else part
    save(state, tmp_path / "source", as_file=False)
    found = verify(tmp_path / "source")
    assert any(all(key in line for key in keys) for line in found.unchecked), found.to_text()
    with pytest.raises(ConversionError, match=f"{keys[0]}, {keys[1]}"):
        convert(tmp_path / "source", tmp_path / "out", ConversionTarget.HF)
    with pytest.raises(FingerprintError, match=f"{keys[0]}, {keys[1]}"):
        fingerprint_checkpoint(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "out", ConversionTarget.HF, part=keys[1]).files
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], average(weights)["lm_head.weight"])


def test_the_average_is_chosen_by_its_key(trained: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    weights, _ = trained
    save({"state": {"model": weights, "ema": average(weights)}}, tmp_path / "source", as_file=True)
    done = doctor(
        *("checkpoint", "convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "torch", "--part", "ema")
    )
    assert (done.code, "left out: state.model" in done.stderr) == (0, True), done.stderr
    written = torch.load(tmp_path / "out" / "pytorch_model_fsdp.bin")
    assert torch.equal(written["lm_head.weight"], average(weights)["lm_head.weight"])
    with pytest.raises(ConversionError, match="optim"):
        convert(tmp_path / "source", tmp_path / "no", ConversionTarget.TORCH, part="optim")
