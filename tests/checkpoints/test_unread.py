"""The whole model is read, or the checkpoint is not judged and not converted: nothing is passed over."""

from __future__ import annotations

import pathlib
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from program import doctor
from safetensors.torch import load_file, save_file
from support import saved_checkpoints as saved
from support.forked import run_script

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.torch_files import order_shards
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.fingerprints import FingerprintError, fingerprint_checkpoint


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("by_four")
    job = pathlib.Path(saved.__file__).with_name("saved_by_four.py")
    done = run_script(job, device="cpu", ranks=4, arguments=[str(directory)])
    assert done.codes == [0] * 4, done.output
    return directory


def test_shards_of_fsdp_and_tensor_parallelism_are_put_together(by_four: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = torch.load(by_four / "whole.pt")
    found = verify(by_four / "strided")
    assert (found.answer, found.num_tensors) == ("sound", len(expected)), found.to_text()
    convert(by_four / "strided", tmp_path / "out", ConversionTarget.HF)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(written[name], expected[name])] == []


@pytest.mark.parametrize("name", ["partial", "quantized", "sparse", "array", "bytes", "inside"])
def test_what_is_not_read_of_a_rank_s_file_is_named(by_four: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    found = verify(by_four / name)
    assert (found.answer, saved.list_troubles(found, "refused")) == ("cannot be judged", {"not_read"}), found.to_text()
    assert {finding.tensor.partition(".")[0] for finding in found.findings} == {name}
    done = convert(by_four / name, tmp_path / "out", ConversionTarget.HF)
    assert (done.files, list(tmp_path.iterdir())) == ([], [])
    with pytest.raises(FingerprintError, match=re.escape(name)):
        fingerprint_checkpoint(by_four / name)


def test_objects_with_tensors_and_wrapper_subclasses_in_dcp_are_named(tmp_path: pathlib.Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(64, 64).bfloat16()
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    states = {
        "tuple": ({"model": {"w": torch.ones(3), "pair": (torch.ones(3), torch.zeros(3))}}, "not_read"),
        "subclass": ({"model": layer.state_dict()}, "pickle"),
    }
    for name, (state, trouble) in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
        if name == "tuple":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no process group is there
                dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
            assert saved.list_troubles(verify(tmp_path / name), "refused") == {trouble}
            assert not convert(tmp_path / name, tmp_path / "out", ConversionTarget.HF).files
    found = verify(tmp_path / "subclass.pt")
    assert (found.answer, saved.list_troubles(found, "refused")) == ("cannot be judged", {"pickle"}), found.to_text()


def test_what_is_beside_a_model_is_mentioned_and_not_judged(tmp_path: pathlib.Path) -> None:
    import numpy

    state = {"model": {"w": torch.ones(3, 3)}, "rng": {"numpy": numpy.random.RandomState(0).get_state()}, "raw": b"1"}
    torch.save(state, tmp_path / "last.pt")
    found = verify(tmp_path / "last.pt")
    assert (found.answer, any("rng" in line for line in found.unchecked)) == ("sound", True), found.to_text()


class Placed:
    """Placement as it is read from a file."""

    def __init__(self, name: str, **facts: int) -> None:
        self.name, self.facts = name, facts

    def get(self, name: str) -> int:
        return self.facts[name]


def test_shards_are_ordered_as_torch_orders_them() -> None:
    """Every order in which three dims of a mesh may divide a tensor, by torch's own translation of it."""
    import itertools

    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        pytest.skip("this torch has no order of shards")
    sizes = (2, 3, 5)

    class Mesh:
        ndim = 3
        shape = sizes

        def size(self, dim: int) -> int:
            return sizes[dim]

    for order in itertools.permutations(range(3)):
        entry = spec.ShardOrderEntry(tensor_dim=0, mesh_dims=order)
        placements = spec.DTensorSpec._convert_shard_order_to_StridedShard(
            (entry,), (spec.Shard(0), spec.Shard(0), spec.Shard(0)), Mesh()
        )
        read = [
            Placed(type(each).__name__, dim=0, split_factor=getattr(each, "split_factor", 1)) for each in placements
        ]
        assert order_shards(sizes, read) == [(0, at) for at in order]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named_with_what_fetches_it(tmp_path: pathlib.Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_text(pointer, encoding="utf-8")
    found = verify(tmp_path)
    assert found.answer == "damaged"
    assert "only a pointer of Git LFS, not the file: `git lfs pull`" in found.to_text()
    assert "0 tensors, 1 file, 0 bytes read)" in found.to_text()


def test_the_state_dict_of_a_pickled_module_is_read_once_saved_alone(tmp_path: pathlib.Path) -> None:
    torch.save(torch.nn.Linear(3, 3), tmp_path / "last.pt")
    found = verify(tmp_path)
    assert "load it with torch.load(FILE, weights_only=False), and save the state dict alone" in found.to_text()
    module = torch.load(tmp_path / "last.pt", weights_only=False)
    torch.save(module.state_dict(), tmp_path / "last.pt")
    assert verify(tmp_path).answer == "sound"


def test_an_adapter_is_not_said_to_lack_a_models_settings(tmp_path: pathlib.Path) -> None:
    names = [f"base_model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB"]
    save_file({name: torch.ones(3, 3) for name in names}, tmp_path / "adapter_model.safetensors")
    done = doctor("checkpoint", "convert", str(tmp_path), str(tmp_path.parent / f"{tmp_path.name}-out"), "--to", "hf")
    assert done.code == 0, done.stderr
    assert "name the file adapter_model.safetensors" in done.stderr
    assert "there is no config.json" not in done.stderr


def test_a_missing_option_is_one_line_with_its_values(tmp_path: pathlib.Path) -> None:
    done = doctor("checkpoint", "convert", str(tmp_path), str(tmp_path / "out"))
    assert done.stderr == "fsdp-doctor: Missing option '--to'. Choose from: hf, dcp, torch, fsdp1, fsdp2\n"
