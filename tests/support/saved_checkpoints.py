"""Checkpoints from the programs that save them, made once for a test session, and functions that damage a copy."""

from __future__ import annotations

import json
import pathlib
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fsdp_doctor.checkpoints.verification import Verification
from support.forked import run_script

SIZES = {
    "vocab_size": 513,
    "hidden_size": 66,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}


def save_all(directory: pathlib.Path) -> None:
    """Saves a checkpoint in a directory for each format."""
    done = run_script(pathlib.Path(__file__).with_name("saved_by_ranks.py"), device="cpu", arguments=[str(directory)])
    assert done.codes == [0, 0], done.output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _save_by_one_process(directory)


def _save_by_one_process(directory: pathlib.Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(directory / "hub", max_shard_size="300KB")
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(directory / "tied")
    mixtral = MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False)
    MixtralForCausalLM(mixtral).save_pretrained(directory / "experts")
    state = model.state_dict()
    for name in ("bin", "legacy", "without_checksums", "full"):
        (directory / name).mkdir()
    names = list(state)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, chosen in halves.items():
        torch.save({name: state[name] for name in chosen}, directory / "bin" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in halves.items() for name in chosen}}
    (directory / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(directory / "bin")
    torch.save(state, directory / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    torch.save(state, directory / "without_checksums" / "pytorch_model.bin")
    torch.serialization.set_crc32_options(True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, directory / "full" / "last.pt"
    )
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapter.save_pretrained(directory / "new_adapter")
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapter.save_pretrained(directory / "adapter")
    _train(directory / "trainer")
    _save_with_lightning(directory / "lightning")


def _train(directory: pathlib.Path) -> None:
    class AtTheEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == 1

    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    Trainer(model, arguments, train_dataset=data, callbacks=[AtTheEnd()]).train()


def _save_with_lightning(directory: pathlib.Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(40, 30)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 40)))
    directory.mkdir(exist_ok=True)
    trainer.save_checkpoint(directory / "last.ckpt")


# Damages


def flip(file: pathlib.Path, at: int) -> None:
    """Flips a bit of the byte at ``at``, which counts from the end if it is negative."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def overwrite(file: pathlib.Path, at: int, new: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(new)] = new
    file.write_bytes(data)


def truncate(file: pathlib.Path, nbytes: int) -> None:
    """Cuts the last ``nbytes`` bytes off a file."""
    file.write_bytes(file.read_bytes()[:-nbytes])


def member_offset(file: pathlib.Path, name: str) -> int:
    """Returns the offset of the bytes of ``ROOT/name`` in a file of torch.save."""
    with zipfile.ZipFile(file) as archive:
        (entry,) = [each for each in archive.infolist() if each.filename.endswith(f"/{name}")]
    header = file.read_bytes()[entry.header_offset : entry.header_offset + 30]
    return entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))


def edit_tensors(file: pathlib.Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Saves the file's tensors again after ``edit``, with safetensors or with torch."""
    if file.suffix == ".safetensors":
        tensors = load_file(file)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    else:
        tensors = torch.load(file, weights_only=False)
        edit(tensors)
        torch.save(tensors, file)


def edit_json(file: pathlib.Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_metadata(directory: pathlib.Path, edit: Callable[[Any], None]) -> None:
    """Changes the metadata of a distributed checkpoint."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    edit(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def save_flat_parameters(directory: pathlib.Path) -> None:
    for rank in range(2):
        torch.save({"_flat_param": torch.randn(90)}, directory / f"pytorch_model_fsdp_rank{rank}.bin")


def say_packed(directory: pathlib.Path) -> None:
    """Marks a checkpoint as compressed, as torch's ZStandard extension does. Compressed data are not checked."""

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]

    edit_metadata(directory, edit)


def list_troubles(found: Verification, severity: str = "damage") -> set[str]:
    return {finding.trouble for finding in found.findings if finding.severity == severity}
