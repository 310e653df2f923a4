"""Damages to checkpoints, each with the kind of trouble that it causes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from support import made_models as made, saved_checkpoints as saved

Damage = Callable[[pathlib.Path], Any]
EMBED, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"
RANK_0, RANK_1 = "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"
GATE_AND_UP = "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"
POSITION_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
HUB, TIED, BIN = "model-00001-of-00003.safetensors", "model.safetensors", "pytorch_model.bin"


def swap(one: str, other: str) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        (directory / one).rename(directory / "x")
        (directory / other).rename(directory / one)
        (directory / "x").rename(directory / other)

    return damage


def tensors(file: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda directory: saved.edit_tensors(directory / file, edit)


def write_codes(state: dict[str, Any]) -> None:
    """Replaces a weight by its float8 codes, in the dtype of the weight."""
    state[DOWN].mul_(448 / state[DOWN].abs().max())
    state[DOWN].copy_(state[DOWN].to(torch.float8_e4m3fn))


def quantize_without_scales(directory: pathlib.Path) -> None:
    """Replaces a weight by its float8 codes, as a quantized model has them, and saves no scales."""
    tensors(TIED, lambda state: state.update({DOWN: state[DOWN].to(torch.float8_e4m3fn)}))(directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "compressed-tensors"}}))


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
    """Shifts the rows of the second shard by one, as a wrongly rounded offset does."""
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
    saved.say_packed(directory)
    saved.truncate(directory / "__1_0.distcp", 100)


def swap_flat_parameters(directory: pathlib.Path) -> None:
    saved.save_flat_parameters(directory)
    swap("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin")(directory)


def save_random_states(directory: pathlib.Path) -> None:
    file = directory / "random_states_0.pkl"
    torch.save({"torch_manual_seed": torch.get_rng_state()}, file)
    saved.flip(file, saved.member_offset(file, "data/0") + 9)


def divide_shard(directory: pathlib.Path) -> None:
    """Adds a second file for the first rank, for which the other rank has no counterpart."""
    (first,) = directory.glob("shard-00001*")
    shutil.copy(first, directory / "shard-00001-model-00002-of-00002.safetensors")


def save_dcp(state: dict[str, Any], num_files: int = 1) -> Damage:
    def damage(directory: pathlib.Path) -> None:
        shutil.rmtree(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            writer = dcp.FileSystemWriter(directory, thread_count=num_files)
            dcp.save(state, storage_writer=writer, no_dist=True)

    return damage


def raw(entries: dict[str, Any], body: bytes) -> Damage:
    """Writes a safetensors file with the given header."""

    def write(directory: pathlib.Path) -> None:
        text = json.dumps(entries).encode()
        (directory / TIED).write_bytes(len(text).to_bytes(8, "little") + text + body)

    return write


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def moments(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Changes Adam's state for a matrix."""

    def change(state: dict[str, Any]) -> None:
        kept = state["optimizer"]["state"]
        edit(next(each for each in kept.values() if each["exp_avg"].shape == (66, 66)))

    return tensors("last.pt", change)


def full(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Changes a file with a model and an optimizer that numbers its parameters in one group."""
    return tensors("last.pt", edit)


def exchange_states(state: dict[str, Any]) -> None:
    kept = state["optimizer"]["state"]
    one, other = (
        next(n for n, each in kept.items() if each["exp_avg"].shape == shape) for shape in ((66, 66), (97, 66))
    )
    kept[one], kept[other] = kept[other], kept[one]


def copy_moments(state: dict[str, Any]) -> None:
    kept = state["optimizer"]["state"]
    one, other = [each for each in kept.values() if each["exp_avg"].shape == (66, 66)][:2]
    other["exp_avg"] = one["exp_avg"].clone()


def lose_moments(rows: int) -> Damage:
    """Sets rows of the first moments to zero, for one of several matrices of the same shape."""

    def lose(state: dict[str, Any]) -> None:
        kept = state["optimizer"]["state"].values()
        next(each for each in kept if each["exp_avg"].shape == (66, 66))["exp_avg"][:rows] = 0

    return full(lose)


def copy_rows(name: str) -> Damage:
    """Copies the rows of rank 0 to rank 1."""

    def copy(directory: pathlib.Path) -> None:
        rows = torch.load(directory / RANK_0, weights_only=False)[name].to_local()
        tensors(RANK_1, lambda state: state[name].to_local().copy_(rows))(directory)

    return copy


def copy_expert(state: dict[str, Any]) -> None:
    one, other = (next(n for n in state if f"experts.{number}.w1" in n) for number in (0, 1))
    state[other] = state[one].clone()


def repeat_rows(kind: str) -> Damage:
    """Overwrites the second half of a matrix with the first, in one of three layers with 64 rows."""

    def repeat(state: dict[str, Any]) -> None:
        state.clear()
        torch.manual_seed(0)
        for layer in range(3):
            state[f"model.layers.{layer}.self_attn.{kind}.weight"] = torch.randn(64, 64)
        state[f"model.layers.1.self_attn.{kind}.weight"][32:] = state[f"model.layers.1.self_attn.{kind}.weight"][:32]

    return tensors(BIN, repeat)


def read_as(wrote: torch.dtype, says: torch.dtype, *names: str) -> Damage:
    """Stores the bytes of one dtype as another dtype, for the named tensors or, without names, for all tensors."""

    def cast(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            state[name] = tensor.to(wrote).view(says) if not names or name in names else tensor.to(says)

    return tensors(TIED, cast)


def two_layers(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Saves a model of two layers, and changes it."""

    def save(directory: pathlib.Path) -> None:
        config = saved.LlamaConfig(**saved.SIZES | {"num_hidden_layers": 2}, tie_word_embeddings=True)
        saved.LlamaForCausalLM(config).save_pretrained(directory)
        tensors(TIED, edit)(directory)

    return save


def to_bits(state: dict[str, Any]) -> None:
    """Stores the bytes of bfloat16 tensors as float32."""
    for name, tensor in state.items():
        if name != EMBED and tensor.ndim == 2:
            state[name] = torch.cat([tensor, tensor.flip(1)], 1).bfloat16().view(torch.float32)


def widen(state: dict[str, Any]) -> None:
    """Makes all layers wider than config.json says, by the same amount."""
    for name in state:
        if "_proj" in name and ".mlp." in name:
            tensor = state[name]
            state[name] = torch.cat([tensor, tensor[:, :8]], 1) if "down" in name else torch.cat([tensor, tensor[:8]])


def zero_rows_of(name: str, first: int, after: int) -> Damage:
    return tensors(TIED, lambda t: t[name][first:after].zero_())


def save_older_file(directory: pathlib.Path) -> None:
    """Saves two files that each have the steps of some modules, one of them from an older training step."""
    made_state = made.make_averaged(7.0)
    kept = {name: slots for name, slots in made_state["optimizer"]["state"].items() if name != "embed.weight"}
    state = {f"state.{name}.{slot}": tensor for name, slots in kept.items() for slot, tensor in slots.items()}
    state |= {name: made_state["model"][name] for name in kept}
    save_dcp(state, num_files=2)(directory)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn.endswith(".step") and info.relative_path == "__0_1.distcp":
            state[index.fqn] = torch.tensor(5.0)
    save_dcp(state, num_files=2)(directory)


def tear_step(state: dict[str, Any]) -> None:
    """Reduces the step by one for all parameters after the fifth."""
    for kept in list(state["optimizer"]["state"].values())[5:]:
        kept["step"] -= 1


def shorten_factors(state: dict[str, Any]) -> None:
    made.keep_factors(state)["layers.1.mlp.up_proj.weight"]["exp_avg_sq_row"].resize_(30)


def fuse(edit: Callable[[dict[str, Any]], Any], **config: Any) -> Damage:
    """Saves a model with fused projections and its config.json, and changes the model."""

    def write(directory: pathlib.Path) -> None:
        made.make(made.make_fused, edit)(directory)
        (directory / "config.json").write_text(json.dumps(made.HEADS | config))

    return write


# Maps a name to the saved checkpoint, a damage to it, and the kind of trouble that it causes. The numbers are those of
# the kinds that users report.
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
    "a truncated DCP file": ("dcp", lambda d: saved.truncate(d / "__1_0.distcp", 50_000), "file"),
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
        "missing_rank",
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
    "an index that names a ghost": ("hub", index(lambda m: m.update(ghost=HUB)), "lost_tensor"),
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
    "packed items, truncated": ("columns", pack_and_truncate, "file"),
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
    "a hole between two tensors": ("legacy", raw({"a": entry(0, 16), "b": entry(24, 40)}, bytes(range(40))), "file"),
    "a hole before the first tensor": ("legacy", raw({"a": entry(8, 16)}, bytes(range(16))), "file"),
    "one of two layers lacks a projection": (
        "tied",
        two_layers(lambda t: t.pop("model.layers.1.mlp.down_proj.weight")),
        "missing_tensor",
    ),
    "one of two layers lacks a norm": (
        "tied",
        two_layers(lambda t: t.pop("model.layers.0.input_layernorm.weight")),
        "missing_tensor",
    ),
    "a negative mean of squares": ("full", moments(lambda m: m["exp_avg_sq"][1, 2].fill_(-1e-4)), "moments"),
    "a mean of squares of zeros": ("full", moments(lambda m: m["exp_avg_sq"].zero_()), "moments"),
    "moments at step 0": ("full", moments(lambda m: m["step"].zero_()), "moments"),
    "a scheduler lost on one rank": (
        "verl",
        tensors("extra_state_world_size_2_rank_1.pt", lambda t: t.pop("lr_scheduler")),
        "ranks_disagree",
    ),
    "other kv heads in config.json": (
        "tied",
        lambda d: saved.edit_json(d / "config.json", num_key_value_heads=1),
        "shape",
    ),
    "a larger intermediate size in config.json": (
        "tied",
        lambda d: (saved.edit_json(d / "config.json", intermediate_size=97), tensors(TIED, widen)(d)),
        "shape",
    ),
    "one layer of another width": ("tied", tensors(TIED, lambda t: t.update({DOWN: t[DOWN][:, :90]})), "shape"),
    "more layers than config.json has": (
        "tied",
        lambda d: saved.edit_json(d / "config.json", num_hidden_layers=2),
        "extra_layers",
    ),
    "a head of another width than the embedding": (
        "legacy",
        tensors(BIN, lambda t: t.update({HEAD: t[HEAD][:, :60]})),
        "shape",
    ),
    "bits of bfloat16 as float32": ("tied", tensors(TIED, to_bits), "other_bits"),
    "one value of 3e38": ("tied", tensors(TIED, lambda t: t[DOWN][7, 3].fill_(3e38)), "huge"),
    "a matrix a thousand times too large": ("tied", tensors(TIED, lambda t: t[DOWN].mul_(1e3)), "magnitude"),
    "half of a projection's rows zero": (
        "tied",
        zero_rows_of("model.layers.1.self_attn.q_proj.weight", 0, 31),
        "zero_rank",
    ),
    "the last shard missing, and no vocabulary in it": (
        "shards",
        lambda d: (
            next(d.glob("shard-00002*")).unlink(),
            saved.LlamaConfig(**saved.SIZES).save_pretrained(d),
        ),
        "missing_rank",
    ),
    "a control character's name": (
        "legacy",
        raw({"a\n\x1b[2Jsound: fine": entry(0, 4)}, b"\0\0\xc0\x7f"),
        "nonfinite",
    ),
    "one layer's matrix of fewer rows": ("legacy", tensors(BIN, lambda t: t.update({DOWN: t[DOWN][:33]})), "shape"),
    "MLPs that do not fit": (
        "legacy",
        tensors(BIN, lambda t: t.update({n: v[:90] for n, v in t.items() if "up_proj" in n})),
        "shape",
    ),
    "a norm of heads that divides no heads": (
        "legacy",
        tensors(
            BIN, lambda t: t.update({f"model.layers.{n}.self_attn.q_norm.weight": torch.ones(20) for n in range(3)})
        ),
        "shape",
    ),
    "the config.json of another kind of model": (
        "tied",
        lambda d: saved.edit_json(d / "config.json", model_type="qwen3"),
        "other_model",
    ),
    "an optimizer whose model is lost": (
        "trainer",
        lambda d: (d / "checkpoint-1" / TIED).unlink(),
        "no_model",
    ),
    "a module without adapter in one layer": (
        "adapter",
        tensors("adapter_model.safetensors", lambda t: [t.pop(n) for n in list(t) if "layers.1.self_attn.v_proj" in n]),
        "adapter_part",
    ),
    "an average that lacks a tensor": (
        "full",
        full(lambda t: t.update(ema={n: v for n, v in t["model"].items() if n != DOWN})),
        "missing_tensor",
    ),
    "an average with a matrix of zeros": (
        "full",
        full(lambda t: t.update(ema={n: v * (n != DOWN) for n, v in t["model"].items()})),
        "zero_matrix",
    ),
    "a rank's rows twice": ("verl", copy_rows("model.layers.1.self_attn.q_proj.weight"), "copied_rows"),
    "a matrix as another layer's": (
        "tied",
        tensors(TIED, lambda t: t.update({DOWN: t["model.layers.0.mlp.down_proj.weight"].clone()})),
        "copied_tensor",
    ),
    "an expert as another one": ("experts", tensors(TIED, copy_expert), "copied_tensor"),
    "the moments of another parameter": ("full", full(copy_moments), "copied_tensor"),
    "codes of float8 as weights": ("tied", tensors(TIED, write_codes), "codes"),
    "codes without their scales": ("tied", quantize_without_scales, "scales"),
    "a matrix of one value": ("tied", tensors(TIED, lambda t: t[DOWN].fill_(0.02)), "constant"),
    "half of a matrix's columns zero": ("tied", tensors(TIED, lambda t: t[DOWN][:, :48].zero_()), "zero_columns"),
    "twenty equal rows": ("tied", tensors(TIED, lambda t: t[DOWN][10:30].copy_(t[DOWN][10].clone())), "equal_rows"),
    "half of the rows as the other half": ("legacy", repeat_rows("o_proj"), "equal_rows"),
    "a norm of zeros": (
        "tied",
        tensors(TIED, lambda t: t["model.layers.1.input_layernorm.weight"].zero_()),
        "zero_matrix",
    ),
    "float16 read as bfloat16": ("tied", read_as(torch.float16, torch.bfloat16), "other_bits"),
    "bfloat16 read as float16": ("tied", read_as(torch.bfloat16, torch.float16, DOWN), "other_bits"),
    "one value of 1e36": ("tied", tensors(TIED, lambda t: t[DOWN][7, 3].fill_(1e36)), "huge"),
    "a mean of squares that is too small": ("full", moments(lambda m: m["exp_avg"].mul_(1e3)), "moments"),
    "a greatest mean of squares that is smaller": (
        "full",
        moments(lambda m: m.update(max_exp_avg_sq=m["exp_avg_sq"] / 2)),
        "moments",
    ),
    "moments lost for one matrix": ("full", lose_moments(66), "moments"),
    "moments lost for half a matrix": ("full", lose_moments(33), "moments"),
    "the states of two parameters exchanged": ("full", full(exchange_states), "other_optimizer"),
    "the optimizer of a narrower model": (
        "trainer",
        tensors(
            "checkpoint-1/optimizer.pt",
            lambda t: [
                each.update({kind: each[kind][:50, :50].clone() for kind in ("exp_avg", "exp_avg_sq")})
                for each in t["state"].values()
                if each["exp_avg"].ndim == 2
            ],
        ),
        "other_optimizer",
    ),
    "a parameter twice in its group": (
        "full",
        full(lambda t: t["optimizer"]["param_groups"][0]["params"].append(0)),
        "other_optimizer",
    ),
    "a negative step": ("full", moments(lambda m: m["step"].fill_(-3)), "setting"),
    "a step and a half": ("full", moments(lambda m: m["step"].fill_(1.5)), "setting"),
    "a learning rate of NaN": (
        "full",
        full(lambda t: t["optimizer"]["param_groups"][0].update(lr=float("nan"))),
        "setting",
    ),
    "a scale of zero": ("full", full(lambda t: t.update(scaler={"scale": 0.0, "growth_factor": 2.0})), "setting"),
    "half of a random state": (
        "full",
        full(lambda t: t.update(rng_state=torch.get_rng_state()[:2528].clone())),
        "random_state",
    ),
    "a trainer that counts other steps": (
        "trainer",
        lambda d: saved.edit_json(d / "checkpoint-1" / "trainer_state.json", global_step=9),
        "steps_contradict",
    ),
    "a negative variance": (
        "legacy",
        made.make(made.make_convolutions, lambda t: t["layer2.0.bn1.running_var"][3].fill_(-0.1)),
        "variance",
    ),
    "a variance lost": (
        "legacy",
        made.make(made.make_convolutions, lambda t: t.pop("layer2.0.bn1.running_var")),
        "statistics",
    ),
    "a count of batches lost": (
        "legacy",
        made.make(made.make_convolutions, lambda t: t.pop("layer2.0.bn1.num_batches_tracked")),
        "statistics",
    ),
    "a variance lost in Lightning's file": (
        "lightning",
        tensors(
            "last.ckpt",
            lambda t: t.update(
                state_dict={n: v for n, v in made.make_convolutions().items() if n != "layer2.0.bn1.running_var"}
            ),
        ),
        "statistics",
    ),
    "a transposed convolution": (
        "legacy",
        made.make(made.make_convolutions, lambda t: made.transpose(t, "layer2.0.conv1.weight")),
        "shape",
    ),
    "a transposed matrix": (
        "legacy",
        made.make(made.make_perceptrons, lambda t: made.transpose(t, "layers.2.up.weight")),
        "shape",
    ),
    "a gate of an LSTM lost": (
        "legacy",
        made.make(made.make_cells, lambda t: t.update({"rnn.weight_ih_l1": t["rnn.weight_ih_l1"][:48]})),
        "gates",
    ),
    "a gate of an LSTM lost in all tensors of a layer": (
        "legacy",
        made.make(made.make_cells, lambda t: t.update({n: v[:48] for n, v in t.items() if n.endswith("_l1")})),
        "gates",
    ),
    "a gate of a GRU lost": (
        "legacy",
        made.make(made.make_cells, lambda t: t.update({"rnn.weight_hh_l1": t["rnn.weight_hh_l1"][:32]}), torch.nn.GRU),
        "gates",
    ),
    "a float32 weight that is older than the model's": (
        "legacy",
        made.make(made.make_rounded, lambda t: t["master"]["layers.1.mlp.up_proj.weight"].mul_(1.001)),
        "master",
    ),
    "two float32 weights exchanged": (
        "legacy",
        made.make(made.make_rounded, lambda t: made.exchange(t["master"], *GATE_AND_UP)),
        "master",
    ),
    "two float32 weights exchanged in the optimizer": (
        "legacy",
        made.make(made.make_averaged, lambda t: made.exchange(made.keep_masters(t), *GATE_AND_UP), 7.0),
        "master",
    ),
    "an average of another vocabulary": (
        "legacy",
        made.make(made.make_averaged, lambda t: t["ema"].update({"embed.weight": torch.randn(97, 32)}), 7.0),
        "average",
    ),
    "an average with a matrix of the model's": (
        "legacy",
        made.make(
            made.make_averaged,
            lambda t: t["ema"]["layers.1.mlp.up_proj.weight"].copy_(t["model"]["layers.1.mlp.up_proj.weight"]),
            500.0,
        ),
        "part_of_average",
    ),
    "T5's biases of positions lost in the decoder": (
        "legacy",
        made.make_of_class(made.make_t5, lambda t: t.pop(f"decoder.{POSITION_BIAS}")),
        "missing_tensor",
    ),
    "a tied embedding of another step": (
        "legacy",
        made.make_of_class(made.make_t5, lambda t: t["encoder.embed_tokens.weight"][5].add_(1)),
        "stale_copy",
    ),
    "positions of a smaller picture": (
        "legacy",
        made.make_of_class(
            made.make_vit,
            lambda t: t.update({"embeddings.position_embeddings": t["embeddings.position_embeddings"][:, :10]}),
        ),
        "shape",
    ),
    "the factors of a smaller matrix": (
        "legacy",
        made.make(made.make_averaged, shorten_factors, 7.0),
        "other_optimizer",
    ),
    "a step that was made in part": ("legacy", made.make(made.make_averaged, tear_step, 7.0), "torn_step"),
    "a DCP file of another step": ("dcp", save_older_file, "steps"),
    "a layer as another one, both trained": (
        "legacy",
        made.make(made.make_averaged, lambda t: made.copy_layer(t["model"]), 7.0),
        "copied_tensor",
    ),
    "keys as values": (
        "legacy",
        fuse(lambda t: made.repeat_keys(t["layers.1.self_attn.qkv_proj.weight"])),
        "equal_rows",
    ),
    "keys as values, by heads": (
        "legacy",
        fuse(
            lambda t: made.repeat_keys_of_heads(t["layers.1.attention.query_key_value.weight"]),
            num_key_value_heads=4,
        ),
        "equal_rows",
    ),
    "a gate as the projection up": (
        "legacy",
        fuse(lambda t: made.repeat_gate(t["layers.1.mlp.gate_up_proj.weight"])),
        "equal_rows",
    ),
    "an expert's gate as its projection up": (
        "legacy",
        fuse(lambda t: made.repeat_gate(t["layers.1.mlp.experts.gate_up_proj"][2])),
        "equal_rows",
    ),
    "a scheduler of an older step": (
        "legacy",
        made.make(made.make_averaged, lambda t: made.add_scheduler(t, last_epoch=450, rate=9e-4), 500.0),
        "steps_contradict",
    ),
}
