"""Checkpoints of programs whose formats are not read are named with what reads them, and never taken for ours."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support import saved_checkpoints as saved
from support.inside import doctor

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.formats import OTHER_FORMATS
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.fingerprints import FingerprintError, fingerprint_checkpoint

WEIGHTS = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(8, 8) for i in range(4)}


def zero(directory: pathlib.Path) -> None:
    """Writes files as ZeRO 3 of DeepSpeed 0.18: rank by rank, flat; the module's tensors are empty."""
    step = directory / "global_step10"
    step.mkdir()
    for rank in range(2):
        flat = {"zero_stage": 3, "fp32_flat_groups": [torch.randn(100)]}
        torch.save({"optimizer_state_dict": flat}, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        empty = {name: torch.empty(0) for name in WEIGHTS}
        torch.save({"module": empty}, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (directory / "zero_to_fp32.py").write_text("#")


def zero_1(directory: pathlib.Path) -> None:
    (directory / "global_step1").mkdir()
    torch.save({"module": WEIGHTS}, directory / "global_step1" / "mp_rank_00_model_states.pt")


def universal(directory: pathlib.Path) -> None:
    """Writes files as ds_to_universal.py of DeepSpeed: a directory for each parameter, and the name of the newest."""
    for name, tensor in WEIGHTS.items():
        (directory / "global_step10_universal" / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, directory / "global_step10_universal" / "zero" / name / "fp32.pt")
    torch.save({"module": {}}, directory / "global_step10_universal" / "mp_rank_00_model_states.pt")
    (directory / "latest_universal").write_text("global_step10_universal")


def megatron(directory: pathlib.Path) -> None:
    for rank in range(2):
        (directory / "iter_0000010" / f"mp_rank_0{rank}").mkdir(parents=True)
        file = directory / "iter_0000010" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        torch.save({"model": {"l.weight": torch.randn(96, 64)}, "iteration": 10}, file)


def save_distributed(directory: pathlib.Path, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save({"decoder.layers.self_attention.weight": torch.randn(4, 8, 8)}, checkpoint_id=directory, no_dist=True)
    torch.save({"iteration": 10}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))


def touch(*names: str) -> Callable[[pathlib.Path], Any]:
    def make(directory: pathlib.Path) -> None:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(b"of another program")

    return make


def tensors(name: str, form: str = "pt") -> Callable[[pathlib.Path], Any]:
    return lambda directory: save_file(WEIGHTS, directory / name, {"format": form})


OTHERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "DeepSpeed ZeRO": zero,
    "DeepSpeed ZeRO, ": zero_1,
    "DeepSpeed's universal checkpoint": universal,
    "Megatron": megatron,
    "Megatron (torch_dist)": lambda d: save_distributed(d, "torch_dist"),
    "Megatron-FSDP": lambda d: save_distributed(d, "fsdp_dtensor"),
    "the original Llama": lambda d: torch.save({"layers.0.wq.weight": torch.ones(3, 3)}, d / "consolidated.00.pth"),
    "NeMo": touch("model.nemo"),
    "GGUF": touch("model-Q4_K_M.gguf"),
    "Core ML": touch(
        "a.mlpackage/Data/com.apple.CoreML/model.mlmodel", "a.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    ),
    "ONNX": touch("onnx/model.onnx"),
    "TensorFlow": touch("tf_model.h5"),
    "TensorFlow ": touch("saved_model.pb", "variables/variables.data-00000-of-00001"),
    "Flax": touch("flax_model.msgpack"),
    "Orbax (JAX)": touch("_CHECKPOINT_METADATA", "manifest.ocdbt", "d/0"),
    "MLX": touch("weights.npz"),
    "MLX (": tensors("model.safetensors", "mlx"),
    "TensorRT-LLM": tensors("rank0.safetensors"),
    "vLLM's sharded_state": tensors("model-rank-0-part-0.safetensors"),
    "a packed file": touch("model.safetensors.zst"),
    "a packed file ": touch("pytorch_model.bin.gz"),
}


def test_every_format_that_is_not_read_has_a_case() -> None:
    without = {each.name for each in OTHER_FORMATS} - {name.strip(", (") for name in OTHERS}
    assert without == set(), "OTHERS has no directory of these formats of checkpoints/formats.py"


@pytest.mark.parametrize("name", OTHERS)
def test_another_program_s_checkpoint_is_named_and_refused(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    OTHERS[name](tmp_path / "source")
    found = verify(tmp_path / "source")
    assert found.answer == "cannot be judged", found.to_text()
    assert all(name.strip(", ") in finding.what for finding in found.findings), found.to_text()
    done = convert(tmp_path / "source", tmp_path / "out", ConversionTarget.HF)
    assert (done.files, (tmp_path / "out").exists()) == ([], False)
    with pytest.raises(FingerprintError, match=name.strip(", (").replace("(", r"\(").replace(")", r"\)")):
        fingerprint_checkpoint(tmp_path / "source")


def test_copies_in_other_formats_do_not_prevent_the_judgement_of_a_model(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "hub", tmp_path / "hub")
    touch("original/consolidated.00.pth", "model.gguf", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack")(
        tmp_path / "hub"
    )
    found = verify(tmp_path / "hub")
    assert (found.answer, sum("not read" in line for line in found.unchecked)) == ("sound", 5), found.to_text()


@pytest.mark.parametrize("name", ["model.tar", "model.onnx", "model.gguf"])
def test_a_directory_is_judged_whatever_file_its_name_resembles(
    originals: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    shutil.copytree(originals / "hub", tmp_path / name)
    assert verify(tmp_path / name).answer == "sound"


def test_a_directory_of_verl_is_not_taken_for_megatron(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "verl", tmp_path / "global_step_1" / "actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert verify(tmp_path).answer == "sound"


def test_what_is_unknown_is_told_what_was_looked_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "weights.xyz").write_text("x")
    done = doctor("checkpoint", "verify", str(tmp_path))
    text = " ".join(done.stdout.split())
    assert (done.code, "DCP" in text, "DeepSpeed" in text, "checkpoint-verify" in text) == (2, True, True, True), text


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}], ids=str)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_hugging_face_files_of_torch_are_sound_and_converted(
    tmp_path: pathlib.Path, options: dict[str, bool], is_mapped: bool
) -> None:
    mapping = {name: 1 + number % 2 for number, name in enumerate(WEIGHTS)} if is_mapped else None
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "source"), fqn_to_index_mapping=mapping, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save(WEIGHTS, storage_writer=writer, no_dist=True)
    found = verify(tmp_path / "source")
    assert (found.answer, found.findings) == ("sound", []), found.to_text()
    assert convert(tmp_path / "source", tmp_path / "out", ConversionTarget.HF).files
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == WEIGHTS.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    os.mkfifo(tmp_path / name)
    found = verify(tmp_path)
    assert (found.answer, {finding.file for finding in found.findings}) == ("cannot be judged", {name}), found.to_text()
    assert saved.list_troubles(found, "refused") == {"form"}
