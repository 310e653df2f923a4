"""Sources and arguments that make no sense, dtypes and shapes that are rare: said on every rank, or loaded right."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from support.extraction import Tensors, assert_same, extracted, fsdp2, new_net, raises_soon
from support.loading import everywhere, local_of, on_first, other_tensors
from support.ranks import Setting, on_ranks, this_rank, together, world_size
from support.training import shared_directory
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import LoadError, load_full_tensors, load_optimizer_state
from fsdp_doctor.load.safetensors_files import SafetensorsFile, open_files

_on_two = on_ranks(Setting("cpu", 2))
_MIB = 1 << 20


def test_a_megabyte_of_garbage_is_no_header(tmp_path: pathlib.Path) -> None:
    numbers = b'{"a":' + b"9" * (_MIB - 6) + b"}"
    for garbage in (b"\xc9\x1f" * (_MIB // 2), numbers, b"\0" * _MIB):
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", _MIB) + garbage + bytes(64))
        with pytest.raises(LoadError, match="is no safetensors file: its header is no JSON"):
            SafetensorsFile(path)


def _is_written(dtype: torch.dtype, path: pathlib.Path) -> bool:
    with contextlib.suppress(KeyError, RuntimeError, SafetensorError):
        save_file({"w": torch.zeros(16, dtype=torch.uint8).view(dtype)}, path)
    return path.exists() and "float4" not in str(dtype)


def test_every_dtype_of_whole_bytes_that_safetensors_writes_is_read(tmp_path: pathlib.Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    written = {dtype: path for dtype in dtypes if _is_written(dtype, path := tmp_path / str(dtype))}
    assert len(written) >= 16
    for dtype, path in written.items():
        assert SafetensorsFile(path).tensors["w"].dtype == dtype


def test_what_is_no_file_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(LoadError, match=f"{name}.safetensors is no file"):
            SafetensorsFile(tmp_path / f"{name}.safetensors")


def test_an_index_that_names_files_that_are_not_there_names_them(tmp_path: pathlib.Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "x": "gone.safetensors"}}))
    with pytest.raises(LoadError, match=r"names files that are not there: .*gone.safetensors"):
        open_files(tmp_path)
    for text in ("[" * 200_000, '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'):
        index.write_text(text)
        with pytest.raises(LoadError, match="is no index of a checkpoint"):
            open_files(tmp_path)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(LoadError, match=r"index.json is no file"):
        open_files(tmp_path)


class _BreaksOnRank1(dict[str, torch.Tensor]):
    """A mapping that reads when it is asked."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if this_rank() == 1 and name == "scale":
            raise OSError("the disk is gone")
        return super().__getitem__(name)


def _interrupted() -> Iterator[tuple[str, torch.Tensor]]:
    for number, item in enumerate(other_tensors().items()):
        if number == 2 and this_rank() == 1:
            raise KeyboardInterrupt
        yield item


@_on_two
def test_a_source_that_breaks_on_one_rank_is_that_error_there_and_a_load_error_on_the_other() -> None:
    sources: list[tuple[Callable[[], Any], type[BaseException], str, str]] = [
        (lambda: _BreaksOnRank1(other_tensors()), OSError, "the disk is gone", "it had begun to write"),
        (_interrupted, KeyboardInterrupt, "", "KeyboardInterrupt; it had begun to write 2 tensors"),
    ]
    for make, kind, words, extent in sources:
        here = this_rank() == 1
        with raises_soon(kind if here else LoadError, *([words] if here else ["rank 1 failed", words, extent])):
            load_full_tensors(fsdp2(new_net()), make())


@_on_two
def test_arguments_that_make_no_sense_are_said_on_every_rank() -> None:
    model, tensors = fsdp2(new_net()), other_tensors()
    before = extracted(model)
    sparse = tensors | {"layers.0.up.weight": tensors["layers.0.up.weight"].to_sparse()}
    with FakeTensorMode():
        fake = tensors | {"layers.0.up.weight": torch.empty(14, 8)}
    wrong: list[tuple[Callable[[], Any], type[BaseException], str]] = [
        (lambda: load_full_tensors(None, tensors), TypeError, "the model must be a torch.nn.Module, not NoneType"),  # type: ignore[arg-type]
        (lambda: load_full_tensors(model, tensors, buffers=[1]), TypeError, "buffers must be a mapping"),  # type: ignore[arg-type]
        (lambda: load_full_tensors(model, tensors, bucket_bytes=1e6), TypeError, "must be a whole number"),  # type: ignore[arg-type]
        (lambda: load_full_tensors(model, {"model": tensors}), TypeError, "model must be a tensor, not dict"),  # type: ignore[dict-item]
        (lambda: load_full_tensors(model, sparse), LoadError, "is sparse_coo in the source"),
        (lambda: load_full_tensors(model, fake), LoadError, "is a FakeTensor in the source"),
        (lambda: load_optimizer_state(model, None, {}), TypeError, "the optimizer must be"),  # type: ignore[arg-type]
    ]
    for call, kind, words in wrong:
        with raises_soon(kind, words):
            call()
    assert_same(extracted(model), before)


@_on_two
def test_an_expanded_buffer_is_refused_before_anything_is_written() -> None:
    model, tensors = fsdp2(new_net()), other_tensors()
    before = extracted(model)
    model.scale = torch.ones(1).expand(8)
    for source in (tensors, on_first(tensors)):
        with raises_soon(LoadError, "scale is expanded: several of its elements share memory", "written nothing"):
            load_full_tensors(model, source)
    assert_same(extracted(model), before | {"scale": torch.ones(8)})


@_on_two
def test_an_optimizers_state_of_another_form_is_said_on_every_rank() -> None:
    model = fsdp2(new_net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for state, groups in (([1], []), ({}, 3), ({}, [{}]), ({}, [1]), ({}, [{"params": None}])):
        for source in (on_first, lambda state: state):
            kind = LoadError if source is on_first and this_rank() else TypeError
            with raises_soon(kind, "its state must be a mapping, and its param_groups a list"):
                load_optimizer_state(model, optimizer, source({"state": state, "param_groups": groups}))
    assert not optimizer.state


def _saved_state(model: nn.Module, lr: float = 0.5) -> dict[str, Any]:
    """As ``get_optimizer_state_dict`` returns it after a step."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    moments = {name: torch.ones(model.get_parameter(name).shape) for name in names}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": m, "exp_avg_sq": m + 1} for name, m in moments.items()}
    return {"state": state, "param_groups": [{"params": names, "lr": lr}]}


@_on_two
def test_an_optimizers_state_with_values_or_groups_that_make_no_sense_is_refused_on_every_rank() -> None:
    model = fsdp2(new_net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    name = "layers.0.up.bias"
    array, function, in_none, in_two = (_saved_state(model) for _ in range(4))
    array["state"][name]["exp_avg"] = array["state"][name]["exp_avg"].numpy()
    function["state"][name]["step"] = lambda: 3
    in_none["param_groups"][0]["params"].remove(name)
    in_two["param_groups"].append({"params": [name]})
    wrong = {
        f"exp_avg of {name} is a ndarray in the source": array,
        f"step of {name} is a function in the source": function,
        f"1 parameters with state in none of its param groups: {name}": in_none,
        f"the source has {name} in two param groups": in_two,
    }
    for words, state in wrong.items():
        for source in (on_first, lambda state: state):
            with raises_soon(LoadError, words, "written nothing"):
                load_optimizer_state(model, optimizer, source(state))
    assert not optimizer.state


@_on_two
def test_ranks_whose_optimizers_states_differ_in_more_than_their_tensors_are_told_the_first_difference() -> None:
    model = fsdp2(new_net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    name = "layers.0.up.bias"
    other_lr, other_step, lacking = (_saved_state(model) for _ in range(3))
    if this_rank() == 1:
        other_lr["param_groups"][0]["lr"] = 0.25
        other_step["state"][name]["step"] = torch.tensor(4.0)
        del lacking["state"][name]["exp_avg_sq"]
    for state, words in (
        (other_lr, "param group 0 with lr = 0.25"),
        (other_step, "4.0"),
        (lacking, f"exp_avg_sq of {name}"),
    ):
        with raises_soon(LoadError, "the ranks do not load the same", words, "written nothing"):
            load_optimizer_state(model, optimizer, state)
    assert not optimizer.state
    load_optimizer_state(model, optimizer, _saved_state(model))
    assert optimizer.param_groups[0]["lr"] == 0.5


class _Rare(nn.Module):
    """Of dtypes and shapes that few models have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.randn(1))
        self.fp8 = nn.Parameter(torch.randn(6, 2).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(bool(seed)))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("none_of_it", torch.empty(0, dtype=torch.int32))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e5m2))
        self.register_buffer("signed", torch.full((3,), -seed, dtype=torch.int8))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def _assert_filled(model: nn.Module, expected: Tensors) -> None:
    """Each rank looks at its own part: gloo gathers none of these dtypes."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sorted(held) == sorted(expected)
    for name, full in expected.items():
        local = local_of(held[name])
        if isinstance(held[name], nn.Parameter):
            rows = -(-len(full) // world_size())
            full = full[rows * this_rank() : rows * (this_rank() + 1)]
        assert local.dtype == full.dtype, name
        assert torch.equal(_bytes(local), _bytes(full)), name


@contextlib.contextmanager
def _file(tensors: Tensors) -> Iterator[pathlib.Path]:
    with shared_directory() as name:
        path = pathlib.Path(name) / "model.safetensors"
        if this_rank() == 0:
            save_file(tensors, path)
        together()
        yield path


@_on_two
def test_rare_dtypes_scalars_and_empty_tensors_are_filled_bit_by_bit() -> None:
    expected = _Rare(3).state_dict()
    conjugate = expected | {"complex": expected["complex"].conj()}
    with _file(expected) as path:
        for source in (expected, on_first(expected), path, on_first(path), on_first(iter(expected.items()))):
            model = fully_shard(_Rare(0))
            load_full_tensors(model, source, bucket_bytes=1)
            _assert_filled(model, expected)
    model = fully_shard(_Rare(0))
    load_full_tensors(model, conjugate)
    _assert_filled(model, conjugate)


@everywhere
def test_the_callers_default_device_and_inference_mode_have_no_say() -> None:
    expected = other_tensors()
    for context in (torch.device("meta"), torch.inference_mode()):
        for source in (expected, on_first(expected)):
            model = fsdp2(new_net())
            with context:
                load_full_tensors(model, source)
            assert_same(extracted(model), expected)
            assert not any(parameter.is_inference() for parameter in model.parameters())
