"""``fsdp-doctor checkpoint fingerprint``: checkpoints of every form have the fingerprint of the model, streamed."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.inside import doctor
from support.places import ROOT
from torch import nn

from fsdp_doctor import (
    FingerprintError,
    Fingerprints,
    compare_fingerprints,
    fingerprint,
    fingerprint_checkpoint,
    fingerprint_tensors,
)
from fsdp_doctor.cli.checkpoint import diff as diff_command, fingerprint as fingerprint_command
from fsdp_doctor.errors import UsageError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 70), nn.BatchNorm1d(70), nn.Linear(70, 5).bfloat16())


def in_every_form(model: nn.Module, directory: pathlib.Path) -> dict[str, pathlib.Path]:
    state = model.state_dict()
    names = list(state)
    forms = {form: directory / form for form in ("safetensors", "indexed", "bin", "indexed bin", "dcp")}
    for method in forms.values():
        method.mkdir()
    halves = {"a": names[:4], "b": names[4:]}
    save_file(state, forms["safetensors"] / "model.safetensors")
    torch.save({"model": state}, forms["bin"] / "pytorch_model.bin")
    for part, chosen in halves.items():
        save_file({name: state[name] for name in chosen}, forms["indexed"] / f"{part}.safetensors")
        torch.save({name: state[name] for name in chosen}, forms["indexed bin"] / f"{part}.bin")
    for form, suffix, index in (
        ("indexed", "safetensors", "model.safetensors.index.json"),
        ("indexed bin", "bin", "pytorch_model.bin.index.json"),
    ):
        weight_map = {name: f"{part}.{suffix}" for part, chosen in halves.items() for name in chosen}
        (forms[form] / index).write_text(json.dumps({"weight_map": weight_map}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(dict(state), checkpoint_id=forms["dcp"], no_dist=True)
    forms["file"] = forms["safetensors"] / "model.safetensors"
    forms["torch file"] = forms["bin"] / "pytorch_model.bin"
    return forms


def test_every_form_has_the_fingerprint_of_the_model(model: nn.Module, tmp_path: pathlib.Path) -> None:
    expected = fingerprint(model)
    forms = in_every_form(model, tmp_path)
    assert len(forms) == 7
    for form, method in forms.items():
        assert compare_fingerprints(expected, fingerprint_checkpoint(method)) == [], form
    cast = fingerprint(model, dtype=torch.float16, keep_dtype=["*.num_batches_tracked"])
    assert fingerprint_checkpoint(forms["indexed"], dtype=torch.float16).tensors == cast.tensors


def command(*paths: pathlib.Path, **options: Any) -> int:
    """Runs the command and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        (diff_command if len(paths) > 1 else fingerprint_command)(
            **dict(zip(("checkpoint", "other"), paths, strict=False)), **options
        )
    return int(ended.value.code or 0)


def test_the_command_prints_compares_and_says_what_differs(
    model: nn.Module, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = in_every_form(model, tmp_path)
    assert command(forms["indexed"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(model.state_dict())
    assert f"{fingerprint(model).tensors['0.bias'].hex}  float32   70" in printed
    saved, other = tmp_path / "saved.json", tmp_path / "other.safetensors"
    assert command(forms["bin"], as_json=True, output=saved) == 0
    assert Fingerprints.from_json(saved.read_text()).tensors == fingerprint(model).tensors
    assert command(saved, forms["dcp"]) == 0
    assert capsys.readouterr() == ("", "the same: 0 differences, 9 tensors compared\n")
    with torch.no_grad():
        model[0].bias[3] += 1
    save_file(model.state_dict(), other)
    assert command(saved, other) == 1
    assert capsys.readouterr().out == "0.bias: the values are different\n"
    assert command(saved, other, as_json=True) == 1
    assert [one["kind"] for one in json.loads(capsys.readouterr().out)] == ["values"]


def test_what_is_no_checkpoint_is_a_usage_error(model: nn.Module, tmp_path: pathlib.Path) -> None:
    forms = in_every_form(model, tmp_path)
    data = (forms["file"]).read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-10])
    (tmp_path / "text.bin").write_text("no tensors")
    (tmp_path / "empty").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "other.json").write_text("{}")
    (forms["dcp"] / ".metadata").write_bytes(b"\x80nothing")
    for path in ("short.safetensors", "text.bin", "empty", "list.pt", "other.json", "nowhere", "dcp"):
        with pytest.raises(UsageError) as refused:
            fingerprint_command(checkpoint=tmp_path / path)
        assert path in str(refused.value) or path == "other.json"
    for dtype in ("int8", "other"):
        with pytest.raises(UsageError, match="floating-point"):
            fingerprint_command(checkpoint=forms["file"], dtype=dtype)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_distributed_checkpoint_with_a_damaged_file_is_one_sentence(tmp_path: pathlib.Path, damage: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"weight": torch.arange(1000.0)}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    data = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(data[:100])
    expected = {"truncated": "is truncated", "missing": "is missing"}[damage]
    with pytest.raises(UsageError, match=expected) as refused:
        fingerprint_command(checkpoint=tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are deprecated
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


_NOT_DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "on the meta device": lambda: torch.empty(3, device="meta"),
    "quantized": quantized,
    "a NestedTensor": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("form", _NOT_DENSE)
def test_a_tensor_that_is_not_dense_in_memory_is_refused_by_name(tmp_path: pathlib.Path, form: str) -> None:
    tensors = {"plain": torch.ones(2), "odd": _NOT_DENSE[form]()}
    with pytest.raises(FingerprintError, match=f"^odd is .*{form}"):
        fingerprint_tensors(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the storage of quantized ones is deprecated
        torch.save(tensors, tmp_path / "odd.pt")
    with pytest.raises(UsageError, match=f"odd.pt: odd: the tensor is .*{form.removesuffix('_coo')}"):
        fingerprint_command(checkpoint=tmp_path / "odd.pt")


def test_a_parameter_with_attributes_of_its_own_is_dense() -> None:
    class Loaded(nn.Parameter):
        loader = "of an engine"

    tensor = torch.arange(6.0)
    assert fingerprint_tensors({"a": Loaded(tensor)}).tensors == fingerprint_tensors({"a": tensor}).tensors


def test_an_output_that_is_also_an_input_is_refused_and_unchanged(model: nn.Module, tmp_path: pathlib.Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    for method in (before, after):
        method.write_text(fingerprint(model).to_json())
    for paths, output in (
        ((before,), before),
        ((before, after), before),
        ((before, after), after),
    ):
        options = dict(zip(("checkpoint", "other"), paths, strict=False))
        with pytest.raises(UsageError, match="--output names the checkpoint"):
            (diff_command if len(paths) > 1 else fingerprint_command)(**options, output=output)
        assert Fingerprints.from_json(output.read_text()).tensors == fingerprint(model).tensors
    assert command(before, before) == 0


def test_what_differs_between_two_checkpoints_is_said_with_their_paths(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both, left, right = torch.zeros(2), torch.ones(3), torch.ones(4)
    save_file({"both": both, "a": left}, tmp_path / "left.safetensors")
    save_file({"both": both, "b": right}, tmp_path / "right.safetensors")
    save_file({"other": both}, tmp_path / "neither.safetensors")
    assert command(tmp_path / "left.safetensors", tmp_path / "right.safetensors") == 1
    assert capsys.readouterr().out == (
        f"a: {tmp_path}/right.safetensors does not have this tensor\n"
        f"b: {tmp_path}/left.safetensors does not have this tensor\n"
    )
    with pytest.raises(UsageError, match=r"left\.safetensors has a, both, .*neither\.safetensors other"):
        diff_command(checkpoint=tmp_path / "left.safetensors", other=tmp_path / "neither.safetensors")


def test_an_index_that_names_files_outside_of_its_directory_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "inside").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin")
    index = tmp_path / "inside" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(UsageError, match=r"names files outside its directory: \.\./x\.bin"):
        fingerprint_command(checkpoint=tmp_path / "inside")
    index.write_text(json.dumps({"weight_map": {"a": 1}}))
    with pytest.raises(UsageError, match="is not an index of a checkpoint"):
        fingerprint_command(checkpoint=tmp_path / "inside")


def test_the_program_ends_with_one_sentence(tmp_path: pathlib.Path) -> None:
    done = doctor("checkpoint", "fingerprint", str(tmp_path / "nowhere"))
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"fsdp-doctor: {tmp_path / 'nowhere'} does not exist\n"


def test_a_file_of_code_is_not_run(tmp_path: pathlib.Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"a": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(FingerprintError, match=r"posix\.mkdir"):
        fingerprint_checkpoint(tmp_path / "evil.bin")
    assert not (tmp_path / "made").exists()


_PEAK = """
import resource, sys, torch
from fsdp_doctor import fingerprint_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(fingerprint_checkpoint(sys.argv[1]).tensors), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.processes
def test_a_checkpoint_is_streamed(tmp_path: pathlib.Path) -> None:
    """A tensor of 200 MiB is summed in less memory than that."""
    tensor = torch.arange(50 << 20, dtype=torch.int32)
    save_file({"large": tensor}, tmp_path / "model.safetensors")
    del tensor
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    count, kilobytes = map(int, done.stdout.split())
    assert count == 1
    assert kilobytes < 150 << 10
