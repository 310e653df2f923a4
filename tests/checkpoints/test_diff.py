"""``fsdp-doctor checkpoint diff``, and ``verify --against`` and ``--base``: two checkpoints of any formats."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import saved_checkpoints as saved
from support.inside import doctor

from fsdp_doctor.cli.checkpoint import diff, verify
from fsdp_doctor.errors import UsageError
from fsdp_doctor.weights.fingerprints.checkpoint_files import compare_checkpoints
from fsdp_doctor.weights.names import read_hub_parts

# One model, saved by two ranks in these formats.
BY_RANKS = (
    *("verl", "dcp", "torchtitan", "threads", "files", "alone", "accelerate", "dcp_safetensors", "shards"),
    *("consolidated", "whole"),
)
DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"


def exit_code(left: pathlib.Path, right: pathlib.Path, **options: object) -> int:
    with pytest.raises(SystemExit) as ended:
        diff(checkpoint=left, other=right, **options)  # type: ignore[arg-type]
    return int(ended.value.code or 0)


def test_one_model_is_equal_in_all_formats(originals: pathlib.Path) -> None:
    for name in BY_RANKS:
        found = compare_checkpoints(originals / "whole", originals / name)
        assert (found.differences, len(found.equal)) == ([], 30), name
        assert exit_code(originals / name, originals / "whole", dtype="bfloat16") == 0
    for name in ("bin", "legacy", "full", "without_checksums"):
        assert (compare_checkpoints(originals / "hub", originals / name).differences == []) is (name != "full"), name


def edited(directory: pathlib.Path, **tensors: torch.Tensor) -> pathlib.Path:
    """The model in ``directory/model.safetensors`` with other tensors, by names without dots."""
    path = directory / "edited.safetensors"
    state = load_file(directory / "model.safetensors")
    state |= {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(state, path)
    return path


def test_it_says_how_tensors_differ(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copy(originals / "tied" / "model.safetensors", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    down, up, query = state[DOWN], state[UP], state["model.layers.0.self_attn.q_proj.weight"]
    path = edited(
        tmp_path,
        model__layers__1__mlp__down_proj__weight=down.T,
        model__layers__1__mlp__up_proj__weight=up.roll(33, 1),
        model__layers__0__self_attn__q_proj__weight=query.bfloat16().float(),
        model__layers__0__self_attn__k_proj__weight=state["model.layers.2.self_attn.k_proj.weight"],
        model__norm__weight=state["model.norm.weight"].bfloat16(),
        model__layers__0__self_attn__v_proj__weight=query + 1,
    )
    found = compare_checkpoints(tmp_path / "model.safetensors", path)
    kinds = {difference.name.removesuffix(".weight"): difference.kind for difference in found.differences}
    assert kinds == {
        "model.layers.1.mlp.down_proj": "transposed",
        "model.layers.1.mlp.up_proj": "halves swapped",
        "model.layers.0.self_attn.q_proj": "cast twice",
        "model.layers.0.self_attn.k_proj": "swapped",
        "model.norm": "rounded",
        "model.layers.0.self_attn.v_proj": "values",
    }


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: name.replace("self_attn.", "self_attn._orig_mod."),
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.removeprefix("model."),
        lambda name: f"base_model.model.{name}",
    ],
)
@pytest.mark.parametrize("renamed_first", [True, False])
def test_prefixes_are_stripped_and_shown(
    originals: pathlib.Path, tmp_path: pathlib.Path, rename: object, renamed_first: bool
) -> None:
    assert callable(rename)
    other = tmp_path / "other.safetensors"
    state = load_file(originals / "tied" / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in state.items()}, other)
    paths = [other, originals / "tied"]
    found = compare_checkpoints(*(paths if renamed_first else paths[::-1]))
    assert (found.differences, len(found.equal)) == ([], 29)
    assert found.notes


def test_names_that_differ_otherwise_are_stripped_when_asked(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state = load_file(originals / "tied" / "model.safetensors")
    save_file({f"actor-{name}": tensor for name, tensor in state.items()}, tmp_path / "other.safetensors")
    asked = doctor(
        "checkpoint", "diff", str(originals / "tied"), str(tmp_path / "other.safetensors"), "--strip", "actor-"
    )
    assert (asked.code, asked.stdout) == (0, ""), asked.stderr
    assert "without the prefix actor-" in asked.stderr


def test_a_damaged_checkpoint_is_not_compared(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "verl", tmp_path / "verl")
    (tmp_path / "verl" / "model_world_size_2_rank_1.pt").unlink()
    done = doctor("checkpoint", "diff", str(tmp_path / "verl"), str(originals / "whole"))
    assert (done.code, done.stdout) == (2, "")
    assert "model_world_size_2_rank_1.pt" in done.stderr


def test_what_differs_from_a_reference_is_told_with_its_file_and_rows(
    originals: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(originals / "tied", tmp_path / "tied")
    changed = "model.layers.1.mlp.down_proj.weight"
    saved.edit_tensors(tmp_path / "tied" / "model.safetensors", lambda t: t[changed][7:9].add_(1))
    done = doctor("checkpoint", "verify", str(tmp_path / "tied"), "--against", str(originals / "tied"))
    line = next(line for line in " ".join(done.stdout.split()).split("damage: ") if changed in line)
    assert (done.code, line.startswith(f"model.safetensors, {changed}, rows 7 to 8:")) == (1, True), done.stdout


def answers(*arguments: object, **options: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        verify(directory=arguments[0], **options)  # type: ignore[arg-type]
    return int(ended.value.code or 0), ""


def test_a_flip_in_safetensors_is_found_with_a_reference(
    originals: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(originals / "consolidated", tmp_path / "export")
    shutil.rmtree(tmp_path / "export" / "sharded")
    assert answers(tmp_path / "export", against=originals / "verl")[0] == 0
    (file,) = (tmp_path / "export").glob("*.safetensors")
    saved.flip(file, -1000)
    assert answers(tmp_path / "export")[0] == 0
    capsys.readouterr()
    assert answers(tmp_path / "export", against=originals / "verl")[0] == 1
    assert "differs" in capsys.readouterr().out


def test_an_export_in_a_narrower_dtype_is_sound_with_a_warning(
    originals: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mergers cast to bfloat16; values that are not the rounded ones are damage all the same."""
    shutil.copytree(originals / "tied", tmp_path / "export")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(originals / "tied" / "model.safetensors").items()}
    save_file(weights, tmp_path / "export" / "model.safetensors")
    assert answers(tmp_path / "export", against=originals / "tied")[0] == 0
    assert f"{len(weights)} x warning" in capsys.readouterr().out
    next(iter(weights.values()))[0] += 1
    save_file(weights, tmp_path / "export" / "model.safetensors")
    assert answers(tmp_path / "export", against=originals / "tied")[0] == 1


def test_weights_that_were_never_trained_are_found_with_their_base(
    originals: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base was saved before a step, and ``full`` after it."""
    assert answers(originals / "bin", base=originals / "hub")[0] == 1
    assert "30 of 30 tensors equal those of" in capsys.readouterr().out
    assert answers(originals / "full", base=originals / "hub")[0] == 0


def test_fused_experts_are_compared_with_the_hub_s_own(tmp_path: pathlib.Path) -> None:
    """Each side may have either names; a difference has the Hub's."""
    model = pytest.importorskip("support.families").new_family("qwen3-moe")
    hub, job, changed = tmp_path / "hub", tmp_path / "job.pt", tmp_path / "changed.pt"
    model.save_pretrained(hub)
    state = model.state_dict()
    torch.save(state, job)
    state["model.layers.1.mlp.experts.down_proj"][2] += 1
    torch.save(state, changed)
    assert (exit_code(job, hub), exit_code(hub, job), exit_code(hub, job, keep_names=True)) == (0, 0, 1)
    found = compare_checkpoints(hub, changed, find_parts=read_hub_parts)
    assert [each.name for each in found.differences] == ["model.layers.1.mlp.experts.2.down_proj.weight"]
    assert exit_code(job, changed, config=str(hub)) == 1


@pytest.mark.parametrize(("name", "meant"), [("bf16", "bfloat16"), ("bfloat", "bfloat16"), ("fp16", "float16")])
def test_an_unknown_dtype_gets_the_name_that_torch_has(name: str, meant: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}\\?"):
        diff(checkpoint=tmp_path, other=tmp_path, dtype=name)
