"""``fsdp-doctor checkpoint verify``: what is damaged is found, and what is lawful is not."""

from __future__ import annotations

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
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from program import run
from safetensors.torch import save_file
from support import made_models as made, saved_checkpoints as saved
from support.damages import full, fuse, moments, repeat_rows
from support.inside import doctor

from fsdp_doctor.checkpoints import verification

Damage = Callable[[pathlib.Path], Any]
EMBED, RANK_1 = "model.embed_tokens.weight", "model_world_size_2_rank_1.pt"
HUB, TIED, BIN = "model-00001-of-00003.safetensors", "model.safetensors", "pytorch_model.bin"


# Lawful

# What may be as it is, though it might be a mistake.
LAWFUL = {"buffers": {"replicas_differ"}, "new_adapter": {"lora_start"}}


def test_every_program_s_checkpoints_are_sound(originals: pathlib.Path) -> None:
    directories = sorted(path for path in originals.iterdir())
    assert len(directories) > 25
    for path in directories:
        found = verification.verify(path)
        assert (found.answer, found.num_tensors > 0) == ("sound", True), found.to_text()
        assert saved.list_troubles(found, "warning") == LAWFUL.get(path.name, set()), found.to_text()
        assert found.unchecked


@pytest.mark.parametrize("value", [torch.ones(3, 3), [torch.ones(3)], 5, {}, {"step": 1}, "text"], ids=str)
def test_any_value_that_torch_saves_is_read(tmp_path: pathlib.Path, value: Any) -> None:
    torch.save(value, tmp_path / "model.pt")
    assert verification.verify(tmp_path).answer == "sound"


def test_the_model_s_tensors_are_found_in_every_format(originals: pathlib.Path) -> None:
    from fsdp_doctor.checkpoints.reading import read_checkpoint

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
            if weights := {t.parameter: t.shape for t in state.select("model")}:
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
    """Links files as the cache of huggingface_hub does."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))


def save_sparse_moments(directory: pathlib.Path) -> None:
    """Saves sparse moments, and a counter of a trainer's own, which is no step of a parameter."""
    embed = torch.nn.Embedding(4096, 48)
    optimizer = torch.optim.AdamW(embed.parameters())
    for _ in range(2):
        embed(torch.cat([torch.arange(100), torch.arange(3000, 4096)])).square().sum().backward()
        optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "trainer_state": {"step": 7}}, directory / "last.pt")


def save_two_layers(directory: pathlib.Path) -> None:
    """Saves layers as T5 has them: the first alone has the biases of positions."""
    layers = {f"decoder.block.{number}.q.weight": torch.randn(8, 8) for number in range(2)}
    save_file(layers | {"decoder.block.0.bias.weight": torch.randn(8, 4)}, directory / TIED)


def prune(state: dict[str, Any]) -> None:
    """Prunes all layers alike; config.json stays that of the model before."""
    for name in state:
        if ".mlp." in name and "_proj" in name:
            state[name] = state[name][:, :64] if "down" in name else state[name][:64]


def rename_norm(directory: pathlib.Path) -> None:
    """The files of a class that transformers does not have."""
    saved.edit_json(directory / "config.json", model_type="ours", architectures=["OursForCausalLM"])
    saved.edit_tensors(directory / TIED, lambda t: t.update({"model.final.weight": t.pop("model.norm.weight")}))


def deepen(state: dict[str, Any]) -> None:
    for name in [name for name in state if ".layers.1." in name]:
        state[name.replace(".1.", ".2.")] = state[name].clone()


def keep_small_moments(directory: pathlib.Path) -> None:
    """Squares that float32 does not hold, and a parameter that got no gradient."""
    state = {
        number: {"exp_avg": torch.full((40, 40), size), "exp_avg_sq": torch.zeros(40, 40), "step": torch.tensor(3.0)}
        for number, size in enumerate((1e-25, 0.0))
    }
    torch.save({"optimizer": {"state": state, "param_groups": [{"params": [0, 1]}]}}, directory / "last.pt")


def cast_and_back(state: dict[str, Any]) -> None:
    for name in state:
        state[name] = state[name].bfloat16().float()


def count_three(state: dict[str, Any]) -> None:
    for each in state["optimizer"]["state"].values():
        each["step"].fill_(3)


def stop_gradients(state: dict[str, Any]) -> None:
    """Zeros in all moments of the last layer, as FSDP has of one that nothing uses."""
    names = list(state["model"])
    for number, each in state["optimizer"]["state"].items():
        if ".layers.2." in names[number]:
            each.update({kind: torch.zeros_like(each[kind]) for kind in ("exp_avg", "exp_avg_sq")})


def project_moments(state: dict[str, Any]) -> None:
    """Keeps moments of fewer rows, as optimizers that project the gradient do."""
    for each in state["optimizer"]["state"].values():
        if each["exp_avg"].ndim == 2:
            each.update({kind: each[kind][:8].clone() for kind in ("exp_avg", "exp_avg_sq")})


def count_less(state: dict[str, Any], part: str) -> None:
    """Keeps a step less for the parameters that have the part in their names."""
    for name, kept in state["optimizer"]["state"].items():
        kept["step"] -= float(part in name)


def freeze_copies(state: dict[str, Any]) -> None:
    made.copy_layer(state["model"])
    for name in [name for name in state["model"] if name.startswith(("layers.0.", "layers.1."))]:
        del state["optimizer"]["state"][name]


def project_factors(state: dict[str, Any]) -> None:
    for kept in made.keep_factors(state).values():
        kept["exp_avg_sq_row"] = kept["exp_avg_sq_row"][:8].clone()


VARY = {"steps_vary"}


def keep(_: dict[str, Any]) -> None:
    """Leaves a model as it is."""


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
    "the flat parameters of FSDP1's local state": ("legacy", saved.save_flat_parameters, set()),
    "two files of other endings": ("legacy", lambda d: torch.save(torch.load(d / BIN), d / "pytorch_model.pt"), set()),
    "a picture's layers, narrower than the text's": (
        "tied",
        lambda d: saved.edit_tensors(
            d / TIED, lambda t: t.update({"visual.blocks.0.mlp.up_proj.weight": torch.randn(40, 16)})
        ),
        set(),
    ),
    "a table that one of two layers has": ("legacy", save_two_layers, set()),
    "structured pruning": ("tied", lambda d: saved.edit_tensors(d / TIED, prune), {"pruned"}),
    "a class of which transformers knows nothing": ("tied", rename_norm, {"unusual"}),
    "layers that are copies": ("tied", lambda d: saved.edit_tensors(d / TIED, deepen), {"equal_layers"}),
    "key heads that are repeated": ("legacy", repeat_rows("k_proj"), set()),
    "columns that are padding in all layers": (
        "tied",
        lambda d: saved.edit_tensors(
            d / TIED, lambda t: [t[n][:, 80:].zero_() for n in t if n.endswith("mlp.down_proj.weight")]
        ),
        {"padded_columns"},
    ),
    "an average of some weights": (
        "full",
        full(lambda t: t.update(ema={n: v for n, v in t["model"].items() if "norm" in n})),
        set(),
    ),
    "an optimizer by itself": ("full", full(lambda t: t.pop("model")), {"no_model_here"}),
    "a scheduler that counts processes": ("full", full(lambda t: t.update(lr_scheduler={"last_epoch": 4})), set()),
    "a scheduler that counts something else": (
        "full",
        full(lambda t: (t.update(lr_scheduler={"last_epoch": 7}), count_three(t))),
        {"steps_differ"},
    ),
    "moments in another basis": (
        "full",
        moments(lambda m: (m["exp_avg"].mul_(1e3), m.update(GG=torch.ones(3, 3)))),
        set(),
    ),
    "moments of an optimizer that is not Adam": (
        "full",
        full(lambda t: [each["exp_avg"].mul_(1e3) for each in t["optimizer"]["state"].values()]),
        set(),
    ),
    "a layer without gradients": ("full", full(stop_gradients), set()),
    "moments of smaller matrices": ("full", full(project_moments), set()),
    "a target that no layer has": (
        "adapter",
        lambda d: saved.edit_json(d / "adapter_config.json", target_modules=["q_proj", "v_proj", "query_key_value"]),
        {"no_target"},
    ),
    "random states that are lost": (
        "trainer",
        lambda d: (d / "checkpoint-1" / "rng_state.pth").unlink(),
        {"no_random_state"},
    ),
    "moments that are too small": ("legacy", keep_small_moments, set()),
    "float32 that was bfloat16": ("tied", lambda d: saved.edit_tensors(d / TIED, cast_and_back), set()),
    "layers that grow": (
        "tied",
        lambda d: saved.edit_tensors(
            d / TIED, lambda t: [t[n].mul_(10 ** (3 * int(n.split(".")[2]))) for n in t if ".layers." in n]
        ),
        set(),
    ),
    "layers for the prediction of more tokens": (
        "tied",
        lambda d: saved.edit_json(d / "config.json", num_hidden_layers=2, num_nextn_predict_layers=1),
        set(),
    ),
    "a norm with small weights": (
        "tied",
        lambda d: saved.edit_tensors(d / TIED, lambda t: t["model.layers.1.input_layernorm.weight"].mul_(1e-5)),
        set(),
    ),
    "zeros that begin and end within rows": (
        "tied",
        lambda d: saved.edit_tensors(d / TIED, lambda t: t["model.embed_tokens.weight"].view(-1)[1000:5000].zero_()),
        {"zero_rows"},
    ),
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

# Of the models of support/made_models.py, written over what "legacy" has.
_MADE: dict[str, tuple[Damage, set[str]]] = {
    "convolutions": (made.make(made.make_convolutions, keep), set()),
    "a variance of minus zero": (
        made.make(made.make_convolutions, lambda t: t["layer2.0.bn1.running_var"][3].fill_(-0.0)),
        set(),
    ),
    "the difference of two convolutional models": (
        made.make(made.make_convolutions, lambda t: [v.neg_() for n, v in t.items() if "running_var" in n]),
        {"unusual"},
    ),
    "norms that are frozen": (
        made.make(made.make_convolutions, lambda t: [t.pop(n) for n in list(t) if "num_batches" in n]),
        set(),
    ),
    "the first norm frozen": (
        made.make(made.make_convolutions, lambda t: t.pop("layer0.0.bn1.num_batches_tracked")),
        {"unusual"},
    ),
    "a mean without a variance": (
        made.make(made.make_convolutions, lambda t: t.update({"rewards.running_mean": torch.ones(3)})),
        set(),
    ),
    "matrices that widen and narrow by turns": (
        made.make(
            lambda: {f"layers.{n}.weight": torch.randn(*((64, 32) if n % 2 else (32, 64))) for n in range(5)}, keep
        ),
        set(),
    ),
    "layers of a Sequential, some without parameters": (made.make(made.make_sequential, keep), set()),
    "convolutions and norms of a Sequential": (made.make(made.make_features, keep), set()),
    "stages of which the last is smaller": (made.make(made.make_stages, keep), {"unusual"}),
    "a GRU": (made.make(made.make_cells, keep, torch.nn.GRU), set()),
    "an LSTM that projects": (made.make(lambda: made.make_cells(proj_size=8, bidirectional=True), keep), set()),
    "a cell of another form": (
        made.make(
            lambda: {
                **{f"cell.weight_{kind}": torch.randn(size, 28) for kind, size in (("ih", 9), ("hh", 7))},
                **{f"cell.bias_{kind}": torch.randn(28) for kind in ("ih", "hh")},
            },
            keep,
        ),
        set(),
    ),
    "float32 weights": (made.make(made.make_rounded, keep), set()),
    "float32 weights that are something else": (
        made.make(made.make_rounded, lambda t: [tensor.mul_(1.1) for tensor in t["master"].values()]),
        set(),
    ),
    "weights that are rounded at random": (
        made.make(
            made.make_rounded, lambda t: t.update(model={n: made.round_at_random(v) for n, v in t["master"].items()})
        ),
        set(),
    ),
    "an average of which one part was trained": (
        made.make(made.make_rounded, lambda t: t["fp32_ema"]["embed.weight"].mul_(1.01), "fp32_ema"),
        set(),
    ),
    "an average": (made.make(made.make_averaged, keep, 500.0), set()),
    "an average that equals the model at the start": (
        made.make(made.make_averaged, lambda t: t.update(ema=t["model"]), 5.0),
        set(),
    ),
    "an average that equals the model": (
        made.make(made.make_averaged, lambda t: t.update(ema={n: v.clone() for n, v in t["model"].items()}), 500.0),
        {"equal_average"},
    ),
    "an average of a rank's rows": (
        made.make(made.make_averaged, lambda t: t.update(ema={n: v[:16].clone() for n, v in t["model"].items()}), 5.0),
        set(),
    ),
    "Adafactor": (made.make(made.make_averaged, made.keep_factors, 7.0), set()),
    "Adafactor of projected gradients": (made.make(made.make_averaged, project_factors, 7.0), set()),
    "a layer that was passed over": (made.make(made.make_averaged, lambda t: count_less(t, "layers.3."), 7.0), VARY),
    "a module that was passed over": (
        made.make(made.make_averaged, lambda t: count_less(t, "layers.2.mlp"), 7.0),
        VARY,
    ),
    "projections that were frozen for a step": (
        made.make(made.make_averaged, lambda t: count_less(t, "up_proj"), 7.0),
        VARY,
    ),
    "a deepened model before its training": (
        made.make(made.make_averaged, lambda t: made.copy_layer(t["model"]), 1.0),
        {"equal_layers"},
    ),
    "a deepened model whose layers are frozen": (
        made.make(made.make_averaged, freeze_copies, 7.0),
        {"equal_layers", "no_optimizer"},
    ),
    "fused projections": (fuse(keep), set()),
    "fused heads that are repeated": (
        fuse(lambda t: made.repeat_heads(t["layers.1.self_attn.qkv_proj.weight"])),
        set(),
    ),
    "keys that are the values": (
        fuse(lambda t: [made.repeat_keys(v) for n, v in t.items() if "qkv" in n]),
        set(),
    ),
    "experts that were upcycled": (
        fuse(lambda t: [v.copy_(v[:1].expand_as(v).clone()) for n, v in t.items() if "experts" in n]),
        set(),
    ),
    "a scheduler that counts epochs": (
        made.make(made.make_averaged, lambda t: made.add_scheduler(t, last_epoch=5, rate=1e-3), 500.0),
        set(),
    ),
    "a scheduler that began late": (
        made.make(made.make_averaged, lambda t: made.add_scheduler(t, last_epoch=450, rate=1e-3), 500.0),
        set(),
    ),
    "an epoch's scheduler beside another rate": (
        made.make(made.make_averaged, lambda t: made.add_scheduler(t, last_epoch=5, rate=9e-4), 500.0),
        {"steps_differ"},
    ),
    "T5": (made.make_of_class(made.make_t5, keep), set()),
    "a picture's positions": (made.make_of_class(made.make_vit, keep), set()),
}
MORE_LAWFUL |= {name: ("legacy", change, expected) for name, (change, expected) in _MADE.items()}


@pytest.mark.parametrize("name", MORE_LAWFUL)
def test_what_is_lawful_is_sound(originals: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    source, change, expected = MORE_LAWFUL[name]
    directory = tmp_path / source
    shutil.copytree(originals / source, directory)
    change(directory)
    found = verification.verify(directory)
    assert (found.answer, saved.list_troubles(found, "warning") - LAWFUL.get(source, set())) == ("sound", expected), (
        found.to_text()
    )


def test_what_is_packed_compressed_or_unfinished_cannot_be_judged(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "columns", tmp_path / "packed")
    saved.say_packed(tmp_path / "packed")
    shutil.copytree(originals / "legacy", tmp_path / "unfinished" / "tmp_step_1")
    (tmp_path / "compressed").mkdir()
    with zipfile.ZipFile(tmp_path / "compressed" / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}))
    for name in ("packed", "unfinished", "compressed"):
        found = verification.verify(tmp_path / name)
        assert (found.answer, found.num_bytes) == ("cannot be judged", 0), found.to_text()


def test_files_named_by_rank_and_number_of_ranks_are_those_ranks(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {"model": {EMBED: torch.randn(64, 32, generator=generator)}}
    for rank in range(2):
        torch.save(state, tmp_path / f"model_rank_{rank}_of_2.pt")
    assert verification.verify(tmp_path).answer == "sound"
    (tmp_path / "model_rank_1_of_2.pt").unlink()
    (finding,) = verification.verify(tmp_path).findings
    assert (finding.trouble, finding.file, finding.rank) == ("missing_rank", "model_rank_1_of_2.pt", 1)


def test_one_file_of_several_is_judged_alone(originals: pathlib.Path) -> None:
    for file in (f"hub/{HUB}", f"verl/{RANK_1}"):
        found = verification.verify(originals / file)
        assert (found.answer, found.num_files) == ("sound", 1), found.to_text()


@pytest.mark.parametrize(("rows", "answer"), [(1 << 17, {"frozen_base"}), (1 << 10, set())])
def test_a_large_frozen_base_beside_its_adapters_is_a_warning(
    tmp_path: pathlib.Path, rows: int, answer: set[str]
) -> None:
    base = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    halves = {"A": torch.randn(4, 256), "B": torch.randn(rows, 4)}
    prefix = "base_model.model.lm_head"
    adapters = {f"{prefix}.lora_{half}.default.weight": value for half, value in halves.items()}
    save_file({f"{prefix}.base_layer.weight": base, **adapters}, tmp_path / "model.safetensors")
    found = verification.verify(tmp_path)
    assert found.answer == "sound"
    assert {finding.trouble for finding in found.findings} & {"frozen_base"} == answer


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


def test_names_with_control_characters_are_escaped(tmp_path: pathlib.Path) -> None:
    """The names forge no line and clear no terminal, whichever command prints them."""
    name = "a\n\x1b[2Jsound: fine"
    save_file({name: torch.tensor([torch.nan])}, tmp_path / "model.safetensors")
    save_file({name: torch.tensor([1.0])}, tmp_path / "other.safetensors")
    files = str(tmp_path / "model.safetensors"), str(tmp_path / "other.safetensors")
    for command in (("verify", files[0]), ("diff", *files), ("fingerprint", files[0])):
        done = doctor("checkpoint", *command)
        assert "\x1b" not in done.stdout + done.stderr
        assert not any(line.startswith("sound") for line in (done.stdout + done.stderr).splitlines())
        assert r"\x1b[2J" in done.stdout + done.stderr


def test_a_model_type_with_control_characters_is_escaped(tmp_path: pathlib.Path) -> None:
    directory, other = tmp_path / "saved", tmp_path / "other"
    for each, name in ((directory, "a.weight"), (other, "b.weight")):
        each.mkdir()
        save_file({name: torch.tensor([1.0])}, each / "model.safetensors")
    config = {"model_type": "llama\x1b[2J\nsound: fine", "architectures": ["X\x1b[31m"]}
    (directory / "config.json").write_text(json.dumps(config))
    for command in (("diff", str(directory), str(other)), ("convert", str(directory), f"{directory}-hf", "--to", "hf")):
        done = doctor("checkpoint", *command)
        assert "\x1b" not in done.stdout + done.stderr
        assert r"\x1b[2J" in done.stderr


def test_a_million_tensors_are_refused_in_seconds(tmp_path: pathlib.Path) -> None:
    one = b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(one % number for number in range(1_500_000)) + b"}"
    (tmp_path / TIED).write_bytes(struct.pack("<Q", len(text)) + text)
    found = verification.verify(tmp_path)
    assert (found.answer, "1500000 tensors" in found.findings[0].what) == ("cannot be judged", True)


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
    assert "metadata" in saved.list_troubles(found)
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
    assert (found.answer, saved.list_troubles(found, "refused")) == ("cannot be judged", {"changed"})


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
