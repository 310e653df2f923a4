"""``fsdp-doctor checkpoint verify``: what is damaged is found, and what is lawful is not."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import struct
import sys
import threading
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from program import doctor, run
from safetensors.torch import save_file
from support import saved_checkpoints as saved

from fsdp_doctor.checkpoints import verification
from fsdp_doctor.checkpoints.verification import Verification

Damage = Callable[[pathlib.Path], Any]
EMBED, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"
RANK_0, RANK_1 = "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"
HUB, TIED, BIN = "model-00001-of-00003.safetensors", "model.safetensors", "pytorch_model.bin"


def kinds(found: Verification, severity: str = "damage") -> set[str]:
    return {finding.trouble for finding in found.findings if finding.severity == severity}


# Lawful

# What may be as it is, though it might be a mistake.
LAWFUL = {"buffers": {"replicas_differ"}, "new_adapter": {"lora_start"}}


def test_every_program_s_checkpoints_are_sound(originals: pathlib.Path) -> None:
    directories = sorted(path for path in originals.iterdir())
    assert len(directories) > 25
    for path in directories:
        found = verification.verify(path)
        assert (found.answer, found.num_tensors > 0) == ("sound", True), found.to_text()
        assert kinds(found, "warning") == LAWFUL.get(path.name, set()), found.to_text()
        assert found.unchecked


@pytest.mark.parametrize("value", [torch.ones(3, 3), [torch.ones(3)], 5, {}, {"step": 1}, "text"], ids=str)
def test_any_value_that_torch_saves_is_read(tmp_path: pathlib.Path, value: Any) -> None:
    torch.save(value, tmp_path / "model.pt")
    assert verification.verify(tmp_path).answer == "sound"


def test_the_model_s_tensors_are_found_in_every_format(originals: pathlib.Path) -> None:
    from fsdp_doctor.checkpoints.reading import read_checkpoint
    from fsdp_doctor.checkpoints.record import get_parameter_name

    expected = {
        name: tuple(tensor.shape) for name, tensor in torch.load(originals / "legacy/pytorch_model.bin").items()
    }
    for name in (
        "hub",
        "bin",
        "legacy",
        "full",
        "dcp",
        "torchtitan",
        "threads",
        "files",
        "alone",
        "verl",
        "shards",
        "consolidated",
        "accelerate",
        "dcp_safetensors",
        "without_checksums",
    ):
        states = read_checkpoint(originals / name).states
        for state in states:
            if weights := {get_parameter_name(t): t.shape for t in state.select("model")}:
                assert weights == expected, (name, state.label)


def rename_root(directory: pathlib.Path) -> None:
    (directory / "pytorch_model.bin").rename(directory / "renamed.bin")


def pad_vocabulary(directory: pathlib.Path) -> None:
    saved.edit_tensors(
        directory / "model.safetensors",
        lambda t: t.update(
            {"model.embed_tokens.weight": torch.cat([t["model.embed_tokens.weight"], torch.zeros(71, 66)])}
        ),
    )


def set_ones_to_zero(directory: pathlib.Path) -> None:
    """Biases, and a family of gates all of which begin at zero."""
    save_file(
        {"a.bias": torch.zeros(4096), **{f"blocks.{i}.ada.weight": torch.zeros(80, 40) for i in range(3)}},
        directory / "model.safetensors",
    )


def add_mask(directory: pathlib.Path) -> None:
    mask = torch.full((9, 9), -torch.inf).triu(1)
    saved.edit_tensors(directory / "model.safetensors", lambda t: t.update({"model.layers.0.mask": mask}))


def add_leftovers(directory: pathlib.Path) -> None:
    shutil.copy(directory / "model_world_size_2_rank_0.pt", directory / "model_world_size_4_rank_0.pt")


def link_to_blobs(directory: pathlib.Path) -> None:
    """As the cache of huggingface_hub."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))


def save_sparse_moments(directory: pathlib.Path) -> None:
    """And a counter of a trainer's own, which is no step of a parameter."""
    moment = torch.randn(4096, 48)
    moment[100:3000] = 0
    state = {"state": {0: {"exp_avg": moment, "step": torch.tensor(2.0)}}, "param_groups": [{"params": [0]}]}
    torch.save({"optimizer": state, "trainer_state": {"step": 7}}, directory / "last.pt")


def save_flat_parameters(directory: pathlib.Path) -> None:
    for rank in range(2):
        torch.save({"_flat_param": torch.randn(90)}, directory / f"pytorch_model_fsdp_rank{rank}.bin")


def save_two_layers(directory: pathlib.Path) -> None:
    """As T5, whose first layer alone has the biases of positions."""
    layers = {f"decoder.block.{number}.q.weight": torch.randn(8, 8) for number in range(2)}
    save_file(layers | {"decoder.block.0.bias.weight": torch.randn(8, 4)}, directory / TIED)


def say_packed(directory: pathlib.Path) -> None:
    """As with torch's ZStandard extension: what is packed is not looked at."""

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]

    saved.edit_metadata(directory, edit)


MORE_LAWFUL: dict[str, tuple[str, Damage, set[str]]] = {
    "a file that was renamed": ("legacy", rename_root, set()),
    "a vocabulary padded with zeros": ("tied", pad_vocabulary, {"padded", "zero_rows"}),
    "what is zero at the start": ("legacy", set_ones_to_zero, set()),
    "a mask of -inf": ("tied", add_mask, set()),
    "shards of another world size left behind": ("verl", add_leftovers, {"leftover"}),
    "a DCP file that the metadata does not name": (
        "dcp",
        lambda d: shutil.copy(d / "__0_0.distcp", d / "__7_0.distcp"),
        {"leftover"},
    ),
    "moments of tokens that were never seen": ("legacy", save_sparse_moments, set()),
    "the flat parameters of FSDP1's local state": ("legacy", save_flat_parameters, set()),
    "two files of other endings": ("legacy", lambda d: torch.save(torch.load(d / BIN), d / "pytorch_model.pt"), set()),
    "a picture's layers, narrower than the text's": (
        "tied",
        lambda d: saved.edit_tensors(
            d / TIED, lambda t: t.update({"visual.blocks.0.mlp.up_proj.weight": torch.randn(40, 16)})
        ),
        set(),
    ),
    "a table that one of two layers has": ("legacy", save_two_layers, set()),
    "links to blobs": ("hub", link_to_blobs, set()),
    "a wrong total_size": (
        "hub",
        lambda d: saved.edit_json(d / "model.safetensors.index.json", metadata={"total_size": 5}),
        {"total_size"},
    ),
    "no optimizer, and it was trained": (
        "verl",
        lambda d: [file.unlink() for file in d.glob("optim*")],
        {"no_optimizer"},
    ),
    "a name of a compiled model in a training checkpoint": (
        "full",
        lambda d: torch.save({f"_orig_mod.{n}": torch.ones(3, 3) for n in "ab"}, d / "last.pt"),
        {"wrapped"},
    ),
}


@pytest.mark.parametrize("name", MORE_LAWFUL)
def test_what_is_lawful_is_sound(originals: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    source, change, expected = MORE_LAWFUL[name]
    directory = tmp_path / source
    shutil.copytree(originals / source, directory)
    change(directory)
    found = verification.verify(directory)
    assert (found.answer, kinds(found, "warning") - LAWFUL.get(source, set())) == ("sound", expected), found.to_text()


# Damaged


def swap(one: str, other: str) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        (directory / one).rename(directory / "x")
        (directory / other).rename(directory / one)
        (directory / "x").rename(directory / other)

    return damage


def tensors(file: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda directory: saved.edit_tensors(directory / file, edit)


def zero_tail(directory: pathlib.Path) -> None:
    file = directory / "model.safetensors"
    size = file.stat().st_size
    begin = (size - 40_000) // 4096 * 4096
    saved.overwrite(file, begin, bytes(size - begin))


def punch_page(directory: pathlib.Path) -> None:
    saved.overwrite(directory / "model.safetensors", 20 * 4096, bytes(3 * 4096))


def skip_data(directory: pathlib.Path) -> None:
    state = torch.load(directory / "pytorch_model.bin")
    with torch.serialization.skip_data():
        torch.save(state, directory / "pytorch_model.bin")


def edit_chunk(name: str, **changes: Any) -> Damage:
    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[name]
        entry.chunks[1] = dataclasses.replace(entry.chunks[1], **changes)
        for index in [index for index in metadata.storage_data if index.fqn == name and index.offset[0]]:
            moved = dataclasses.replace(index, offset=entry.chunks[1].offsets)
            metadata.storage_data[moved] = metadata.storage_data.pop(index)

    return lambda directory: saved.edit_metadata(directory, edit)


def change_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.lm_head.weight"].properties.dtype = torch.float16


def shift_offsets(directory: pathlib.Path) -> None:
    """The second shard's rows one too far, as a rounding of an offset does."""
    (file,) = directory.glob("shard-00002*")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    places["lm_head.weight"]["saved_offsets"][0] += 1
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def index(edit: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        (file,) = directory.glob("*.index.json")
        value = json.loads(file.read_text())
        edit(value["weight_map"])
        file.write_text(json.dumps(value))

    return damage


def replace_text(file: str, old: str, new: str) -> Damage:
    return lambda d: (d / file).write_text((d / file).read_text().replace(old, new, 1))


def scale_step(state: dict[str, Any]) -> None:
    for of_parameter in state["state"].values():
        of_parameter["step"] += 1


def same_experts(state: dict[str, Any]) -> None:
    for name in [name for name in state if ".experts." in name]:
        if state[name].ndim == 2:
            state[name] = torch.zeros_like(state[name]) if ".experts.0." not in name else state[name]


def to_shards(directory: pathlib.Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(
        (directory.parent / "verl" / "model_world_size_2_rank_0.pt").read_bytes()
    )


def rename_in(state: dict[str, Any], old: str, new: str) -> None:
    for name in list(state):
        state[name.replace(old, new)] = state.pop(name)


def flatten_all(state: dict[str, Any]) -> None:
    for name in list(state):
        state[name] = state[name].flatten()[::2].clone()


def pack_and_truncate(directory: pathlib.Path) -> None:
    say_packed(directory)
    saved.truncate(directory / "__1_0.distcp", 100)


def swap_flat_parameters(directory: pathlib.Path) -> None:
    save_flat_parameters(directory)
    swap("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin")(directory)


def save_random_states(directory: pathlib.Path) -> None:
    file = directory / "random_states_0.pkl"
    torch.save({"torch_manual_seed": torch.get_rng_state()}, file)
    saved.flip(file, saved.member_offset(file, "data/0") + 9)


def divide_shard(directory: pathlib.Path) -> None:
    """A file more of the first rank, of which the other rank has none."""
    (first,) = directory.glob("shard-00001*")
    shutil.copy(first, directory / "shard-00001-model-00002-of-00002.safetensors")


def save_dcp(state: dict[str, Any]) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        shutil.rmtree(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)

    return damage


# Of what is saved, a damage and the kind of trouble that it is; the numbers are those of the kinds that users report.
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "a flipped bit in DCP": ("dcp", lambda d: saved.flip(d / "__1_0.distcp", 100_000), "checksum"),
    "a flipped bit in a rank's file": (
        "verl",
        lambda d: saved.flip(d / RANK_1, saved.member_offset(d / RANK_1, "data/4") + 99),
        "checksum",
    ),
    "a flipped bit in .bin": (
        "whole",
        lambda d: saved.flip(
            d / "pytorch_model_fsdp.bin", saved.member_offset(d / "pytorch_model_fsdp.bin", "data/3") + 5
        ),
        "checksum",
    ),
    "a flipped bit in .ckpt": (
        "lightning",
        lambda d: saved.flip(d / "last.ckpt", saved.member_offset(d / "last.ckpt", "data/0") + 5),
        "checksum",
    ),
    "a block of zeros in a rank's file": (
        "verl",
        lambda d: saved.overwrite(d / RANK_1, 20 * 4096, bytes(4096)),
        "checksum",
    ),
    "a truncated DCP file": ("dcp", lambda d: saved.truncate(d / "__1_0.distcp", 50_000), "size"),
    "a truncated rank's file": ("verl", lambda d: saved.truncate(d / RANK_1, 5000), "file"),
    "a truncated safetensors file": ("hub", lambda d: saved.truncate(d / HUB, 5), "file"),
    "a truncated legacy file": ("legacy", lambda d: saved.truncate(d / "pytorch_model.bin", 5), "file"),
    "an empty file": ("verl", lambda d: (d / RANK_1).write_bytes(b""), "file"),
    "first bytes that are zero": ("hub", lambda d: saved.overwrite(d / HUB, 0, bytes(8)), "file"),
    "a zero tail": ("tied", zero_tail, "zero_block"),
    "pages of zeros": ("tied", punch_page, "zero_block"),
    "bytes behind the last tensor": ("tied", lambda d: saved.overwrite(d / TIED, 10**9, b"more"), "trailing_bytes"),
    "a rank's file missing": ("verl", lambda d: (d / RANK_1).unlink(), "missing_rank"),
    "a DCP file missing": ("dcp", lambda d: (d / "__1_0.distcp").unlink(), "missing_file"),
    "a Hub file missing": ("hub", lambda d: (d / HUB).unlink(), "missing_file"),
    "a shard in the middle missing": ("shards", lambda d: next(d.glob("shard-00001*")).unlink(), "missing_rank"),
    "the last shard missing, beside a config.json": (
        "shards",
        lambda d: (next(d.glob("shard-00002*")).unlink(), saved.LlamaConfig(**saved.SIZES).save_pretrained(d)),
        "shape",
    ),
    "no .metadata": ("dcp", lambda d: (d / ".metadata").unlink(), "metadata"),
    "half a .metadata": ("dcp", lambda d: saved.truncate(d / ".metadata", 999), "metadata"),
    ".metadata.tmp alone": ("dcp", lambda d: (d / ".metadata").rename(d / ".metadata.tmp"), "metadata"),
    "ranks' files swapped": ("verl", swap(RANK_0, RANK_1), "foreign_rank"),
    "ranks' files of FSDP1 swapped": ("sharded_tensor", swap(RANK_0, RANK_1), "foreign_rank"),
    "DCP files swapped": ("dcp", swap("__0_0.distcp", "__1_0.distcp"), "size"),
    "a rank's file copied": ("verl", lambda d: shutil.copy(d / RANK_0, d / RANK_1), "copied_rank"),
    "a rank's optimizer of another step": ("verl", tensors("optim_world_size_2_rank_1.pt", scale_step), "steps"),
    "another world size in fsdp_config.json": (
        "verl",
        lambda d: saved.edit_json(d / "fsdp_config.json", world_size=4),
        "world_size",
    ),
    "another world size in the names": (
        "verl",
        lambda d: [f.rename(d / f.name.replace("size_2", "size_3")) for f in d.glob("model*")],
        "world_size",
    ),
    "a gap between chunks": (
        "dcp",
        edit_chunk(f"model.{HEAD}", offsets=torch.Size([258, 0]), sizes=torch.Size([255, 66])),
        "gap",
    ),
    "chunks that overlap": (
        "dcp",
        edit_chunk(f"model.{HEAD}", offsets=torch.Size([256, 0]), sizes=torch.Size([256, 66])),
        "overlap",
    ),
    "offsets one row too far": ("shards", shift_offsets, "gap"),
    "another dtype in the metadata": ("dcp", lambda d: saved.edit_metadata(d, change_dtype), "size"),
    "another dtype on one rank": (
        "hsdp",
        tensors(RANK_1, lambda t: t.update({"weight": t["weight"].to(torch.float16)})),
        "ranks_disagree",
    ),
    "a name on one rank only": (
        "buffers",
        tensors(RANK_1, lambda t: t.update(extra=torch.ones(3, 3))),
        "ranks_disagree",
    ),
    "half an index": ("hub", lambda d: saved.truncate(d / "model.safetensors.index.json", 20), "index"),
    "an index that names a ghost": ("hub", index(lambda m: m.update(ghost=HUB)), "index"),
    "an index that names a lost file": ("hub", index(lambda m: m.update({HEAD: "lost.safetensors"})), "index"),
    "an index that lacks a tensor": ("hub", index(lambda m: m.pop(HEAD)), "index"),
    "an index of .bin that lacks a tensor": ("bin", index(lambda m: m.pop(HEAD)), "index"),
    "an index with a name twice": (
        "hub",
        replace_text("model.safetensors.index.json", '"lm_head', '"a": "b", "a": "b", "lm_head'),
        "index",
    ),
    "an index that leaves the directory": ("hub", index(lambda m: m.update({HEAD: "../x.safetensors"})), "index"),
    "an old file beside new ones": ("hub", lambda d: shutil.copy(d.parent / "tied" / TIED, d / TIED), "twice"),
    "NaN": ("tied", tensors(TIED, lambda t: t[DOWN][7, 3].fill_(torch.nan)), "nonfinite"),
    "NaN in bfloat16": (
        "tied",
        tensors(TIED, lambda t: (t.update({n: v.bfloat16() for n, v in t.items()}), t[DOWN][7, 3].fill_(torch.nan))),
        "nonfinite",
    ),
    "inf in float16": (
        "tied",
        tensors(TIED, lambda t: (t.update({n: v.half() for n, v in t.items()}), t[DOWN][7, 3].fill_(torch.inf))),
        "nonfinite",
    ),
    "a matrix of zeros": ("tied", tensors(TIED, lambda t: t[DOWN].zero_()), "zero_matrix"),
    "a rank's rows of zeros": ("tied", tensors(TIED, lambda t: t[EMBED][258:387].zero_()), "zero_rank"),
    "a rank's rows of zeros in its file": (
        "verl",
        tensors(RANK_1, lambda t: t[DOWN].to_local().zero_()),
        "zero_rank",
    ),
    "an expert missing": (
        "experts",
        tensors(TIED, lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n]),
        "experts",
    ),
    "all experts but one zero": ("experts", tensors(TIED, same_experts), "zero_matrix"),
    "one lora_B zero": (
        "adapter",
        tensors("adapter_model.safetensors", lambda t: next(v for n, v in t.items() if "lora_B" in n).zero_()),
        "lora_zero",
    ),
    "a lora_A without its lora_B": (
        "adapter",
        tensors("adapter_model.safetensors", lambda t: t.pop(next(n for n in t if "lora_B" in n))),
        "lora_pair",
    ),
    "another rank of an adapter": ("adapter", lambda d: saved.edit_json(d / "adapter_config.json", r=8), "shape"),
    "wrapper prefixes": ("tied", tensors(TIED, lambda t: rename_in(t, "self_attn", "_orig_mod.self_attn")), "prefix"),
    "module. before all names": ("tied", tensors(TIED, lambda t: rename_in(t, "model.", "module.model.")), "prefix"),
    "flat shards": ("tied", tensors(TIED, flatten_all), "flat"),
    "one flat tensor": ("tied", tensors(TIED, lambda t: t.update({DOWN: t[DOWN].flatten()})), "flat"),
    "a tensor without elements": ("tied", tensors(TIED, lambda t: t.update({DOWN: torch.empty(0)})), "flat"),
    "one rank's rows as the whole": (
        "tied",
        tensors(TIED, lambda t: t.update({n: v[: -(-len(v) // 2)] for n, v in t.items()})),
        "shape",
    ),
    "another vocabulary in config.json": (
        "tied",
        lambda d: saved.edit_json(d / "config.json", vocab_size=600),
        "shape",
    ),
    "no lm_head": (
        "hub",
        lambda d: [tensors(f.name, lambda t: t.pop(HEAD, 0))(d) for f in d.glob("*.safetensors")],
        "missing_tensor",
    ),
    "tied, and different": ("tied", tensors(TIED, lambda t: t.update({HEAD: t[EMBED] + 1})), "tied"),
    "a layer missing": (
        "tied",
        tensors(TIED, lambda t: [t.pop(n) for n in list(t) if ".layers.2." in n]),
        "missing_tensor",
    ),
    "a tensor of one layer missing": ("tied", tensors(TIED, lambda t: t.pop(DOWN)), "missing_tensor"),
    "a parameter without optimizer state": (
        "torchtitan",
        lambda d: saved.edit_metadata(
            d / "step-1",
            lambda m: [m.state_dict_metadata.pop(f"state.{DOWN}.{kind}") for kind in ("exp_avg", "exp_avg_sq", "step")],
        ),
        "optimizer",
    ),
    "a moment missing": (
        "torchtitan",
        lambda d: saved.edit_metadata(d / "step-1", lambda m: m.state_dict_metadata.pop(f"state.{DOWN}.exp_avg_sq")),
        "optimizer",
    ),
    "shards in a converted file": ("legacy", to_shards, "pickled_shards"),
    "saved without data": ("legacy", skip_data, "no_data"),
    "packed items, truncated": ("columns", pack_and_truncate, "size"),
    "a flipped bit in a random state": ("whole", save_random_states, "checksum"),
    "more behind a DCP file of safetensors": (
        "dcp_safetensors",
        lambda d: saved.overwrite(d / "__1_0.distcp", 10**6, b"more"),
        "trailing_bytes",
    ),
    "no index": ("hub", lambda d: (d / "model.safetensors.index.json").unlink(), "index"),
    "a shard's file missing": ("shards", divide_shard, "missing_rank"),
    "a shard copied": (
        "shards",
        lambda d: shutil.copy(next(d.glob("shard-00001*")), next(d.glob("shard-00002*"))),
        "copied_rank",
    ),
    "a flipped bit in a consolidated file": (
        "consolidated",
        lambda d: saved.flip(next(d.glob("model-*")), 300_000),
        "differs",
    ),
    "-inf in a weight": ("tied", tensors(TIED, lambda t: t[DOWN][7, 3].fill_(-torch.inf)), "nonfinite"),
    "no embedding": ("tied", tensors(TIED, lambda t: t.pop(EMBED)), "missing_tensor"),
    "no norm behind the layers": ("tied", tensors(TIED, lambda t: t.pop("model.norm.weight")), "missing_tensor"),
    "half of a vocabulary zero": ("verl", tensors(RANK_1, lambda t: t[HEAD].to_local().zero_()), "zero_rank"),
    "a flat tensor in DCP": (
        "dcp",
        save_dcp({f"layers.{i}.up_proj.weight": torch.randn(9 - i) for i in range(2)}),
        "flat",
    ),
    "Lightning's DCP without meta.pt": ("dcp", save_dcp({"state_dict": {"a": torch.ones(3)}}), "missing_file"),
    "flat parameters swapped": ("legacy", swap_flat_parameters, "foreign_rank"),
    "a config.json that is no JSON": ("hub", lambda d: saved.truncate(d / "config.json", 9), "settings_damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_found(originals: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    source, damage, trouble = DAMAGES[name]
    directory = tmp_path / source
    for each in {source, *({"verl"} if damage is to_shards else ()), *({"tied"} if trouble == "twice" else ())}:
        shutil.copytree(originals / each, tmp_path / each)
    damage(directory)
    found = verification.verify(directory)
    assert (found.answer, trouble in kinds(found)) == ("damaged", True), found.to_text()


def test_what_is_packed_compressed_or_unfinished_cannot_be_judged(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "columns", tmp_path / "packed")
    say_packed(tmp_path / "packed")
    shutil.copytree(originals / "legacy", tmp_path / "unfinished" / "tmp_step_1")
    (tmp_path / "compressed").mkdir()
    with zipfile.ZipFile(tmp_path / "compressed" / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}))
    for name in ("packed", "unfinished", "compressed"):
        found = verification.verify(tmp_path / name)
        assert (found.answer, found.num_bytes) == ("cannot be judged", 0), found.to_text()


def test_one_file_of_several_is_judged_alone(originals: pathlib.Path) -> None:
    for file in (f"hub/{HUB}", f"verl/{RANK_1}"):
        found = verification.verify(originals / file)
        assert (found.answer, found.num_files) == ("sound", 1), found.to_text()


def test_a_finding_names_the_file_the_tensor_the_rows_and_the_rank(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "verl", tmp_path / "verl")
    saved.flip(tmp_path / "verl" / RANK_1, saved.member_offset(tmp_path / "verl" / RANK_1, "data/0") + 8)
    done = doctor("checkpoint", "verify", str(tmp_path / "verl"), "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    (finding,) = found["findings"]
    assert (done.code, found["answer"]) == (1, "damaged"), done.stderr
    assert done.stdout.split()[:2] == ["damaged:", str(tmp_path / "verl")]
    assert (finding["file"], finding["tensor"], finding["rows"], finding["rank"]) == (RANK_1, EMBED, [257, 513], 1)
    assert finding["load"] in " ".join(done.stdout.split())
    assert finding["remedy"] in " ".join(done.stdout.split())


# Hostile


class _Made:
    """Pickles as a call that makes a directory."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["evil.pt", ".metadata"])
def test_a_pickle_of_code_is_refused_by_name_and_not_run(tmp_path: pathlib.Path, file: str) -> None:
    made = tmp_path / "made"
    if file == ".metadata":
        (tmp_path / file).write_bytes(pickle.dumps(_Made(made)))
    else:
        torch.save({"a": _Made(made)}, tmp_path / file)
    done = doctor("checkpoint", "verify", str(tmp_path))
    assert (done.code, "posix.mkdir" in done.stdout) == (2, True), done.stdout
    assert done.stdout.startswith("cannot be judged")
    assert not made.exists()


def _nested(levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("opcode", [b"r", b"B", b"X", b"\x8e"])
def test_a_length_of_a_pickle_that_is_not_there_takes_no_memory(tmp_path: pathlib.Path, opcode: bytes) -> None:
    """An index of the memo, and lengths of bytes and texts."""
    code = b"\x80\x04" + (b"K\x01" if opcode == b"r" else b"") + opcode + b"\xff\xff\xff\x7f\x01\x00\x00\x00."
    (tmp_path / ".metadata").write_bytes(code)
    tracemalloc.start()
    assert verification.verify(tmp_path).answer == "damaged"
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def test_what_is_no_checkpoint_is_refused_in_bounded_time(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.pt").symlink_to(tmp_path / "nowhere")
    torch.save({"a": _nested(40)}, tmp_path / "without_end.pt")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with open(tmp_path / "sparse.safetensors", "wb") as file:
        text = json.dumps({"w": {"dtype": "U8", "shape": [2 << 40], "data_offsets": [0, 2 << 40]}}).encode()
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + (2 << 40))
        except OSError:
            pytest.skip("the file system takes no file of 2 TiB")
    found = verification.verify(tmp_path)
    assert found.answer == "damaged"
    files = {"pipe.safetensors", "gone.pt", "without_end.pt", "config.json", "sparse.safetensors"}
    assert files == {finding.file for finding in found.findings}
    assert found.num_bytes < 1 << 20


def test_a_directory_without_a_checkpoint_cannot_be_judged(tmp_path: pathlib.Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert doctor("checkpoint", "verify", str(tmp_path)).code == 2
    missing = doctor("checkpoint", "verify", str(tmp_path / "nowhere"))
    assert (missing.code, missing.stdout) == (2, "")
    assert missing.stderr == f"fsdp-doctor: cannot read {tmp_path / 'nowhere'}: No such file or directory\n"


def test_a_metadata_that_names_files_elsewhere_is_damaged(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "columns", tmp_path / "columns")

    def leave(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    saved.edit_metadata(tmp_path / "columns", leave)
    found = verification.verify(tmp_path / "columns")
    assert "metadata" in kinds(found)
    assert found.num_files == 1


def test_progress_is_told_by_one_thread_at_a_time(originals: pathlib.Path) -> None:
    told: list[tuple[int, int]] = []
    busy = threading.Lock()

    def tell(*counts: int) -> None:
        assert not busy.locked()
        with busy:
            time.sleep(1e-4)  # long enough for the other thread to come
        told.append((counts[0], counts[1]))

    found = verification.verify(originals / "dcp", progress=tell)
    assert told == sorted(set(told))
    assert told[-1] == (found.num_bytes, found.num_bytes)


def test_a_file_that_changes_meanwhile_cannot_be_judged(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "whole", tmp_path / "whole")
    file = tmp_path / "whole" / "pytorch_model_fsdp.bin"
    found = verification.verify(tmp_path / "whole", progress=lambda *_: os.utime(file))
    assert (found.answer, kinds(found, "refused")) == ("cannot be judged", {"changed"})


def test_a_zip64_file_is_read(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = zipfile.ZipFile(originals / "whole" / "pytorch_model_fsdp.bin")
    with source, zipfile.ZipFile(tmp_path / "model.bin", "w") as target:
        for entry in source.infolist():
            with target.open(entry.filename, "w", force_zip64=True) as member:
                member.write(source.read(entry))
    found = verification.verify(tmp_path)
    assert (found.answer, found.num_tensors) == ("sound", 30), found.to_text()


def _damaged_anywhere(file: pathlib.Path) -> Iterator[bytes]:
    data = file.read_bytes()
    for step in range(60):
        at = step * len(data) // 60
        yield data[:at] + bytes([data[at] ^ (1 << step % 8)]) + data[at + 1 :]
    for step in range(1, 20):
        yield data[: step * len(data) // 20]


@pytest.mark.parametrize("source", ["columns/.metadata", "item/weights_1.pt", "adapter/adapter_model.safetensors"])
def test_no_damage_breaks_the_doctor(originals: pathlib.Path, tmp_path: pathlib.Path, source: str) -> None:
    directory = tmp_path / "copy"
    shutil.copytree((originals / source).parent, directory)
    for data in _damaged_anywhere(originals / source):
        (directory / pathlib.PurePath(source).name).write_bytes(data)
        assert verification.verify(directory).findings is not None


_BOUNDED = """
import pathlib, resource, sys, threading
from fsdp_doctor.checkpoints.verification import verify
threading.stack_size(1 << 20)
(pages, *_) = pathlib.Path("/proc/self/statm").read_text().split()
limit = int(pages) * resource.getpagesize() + (30 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = verify(pathlib.Path(sys.argv[1]))
print("torch" in sys.modules, found.answer, found.num_bytes > 2 * 100 << 20)
"""


def test_thirty_mebibytes_suffice_for_any_size(tmp_path: pathlib.Path) -> None:
    tensor = torch.randn(25 << 20)
    save_file({"large": tensor}, tmp_path / "model.safetensors")
    torch.save({"large": tensor}, tmp_path / "model.pt")
    del tensor
    done = run(sys.executable, "-c", _BOUNDED, str(tmp_path))
    assert done.stdout == "False sound True\n", done.stderr
