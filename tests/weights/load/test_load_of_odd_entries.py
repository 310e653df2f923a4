"""Tests what a model has beside the tensors of a checkpoint: the report of a load names what it did not bring."""

from __future__ import annotations

from typing import Any

import torch
from support.examined import finding, kinds
from support.extraction import Block, Net, extracted, fsdp2, mesh_over, new_net, on_the_device, raises_soon
from support.loading import everywhere, on_first, other_tensors
from support.ranks import this_device, together
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_doctor import LoadError, examine, full_state_dict, full_tensors, load_full_tensors, save_full_tensors


class WithState(nn.Linear):
    """A module whose state dict has what is no tensor, as of Transformer Engine."""

    step = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def _with_state() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(WithState(8, 8), nn.Linear(8, 8))


@everywhere
def test_extra_state_is_passed_over_and_named() -> None:
    source = _with_state().state_dict()
    assert isinstance(source["0._extra_state"], dict)
    for given in (source, on_first(source), iter(source.items())):
        together()
        model = fully_shard(_with_state().to(this_device()), mesh=mesh_over())
        report = load_full_tensors(model, given)
        assert (report.loaded, report.superfluous) == (4, ())
        assert report.extra_states == ("0._extra_state",)
    assert finding(model, "extra-state").severity == "note"
    with new_directory() as directory:
        assert save_full_tensors(model, directory, names="model").extra_states == ("0._extra_state",)
        assert load_full_tensors(model, directory).loaded == 4


@everywhere
def test_another_models_extra_state_is_superfluous() -> None:
    model = fully_shard(_with_state().to(this_device()), mesh=mesh_over())
    source = _with_state().state_dict() | {"1._extra_state": torch.ones(1)}
    with raises_soon(LoadError, "1._extra_state"):
        load_full_tensors(model, source)


class Ambiguous(nn.Linear):
    """Module whose child is called as torch.compile calls what it wraps."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._orig_mod = nn.Linear(4, 4)


@everywhere
def test_tensors_that_would_have_one_name_are_refused_by_name() -> None:
    model = fully_shard(nn.Sequential(Ambiguous().to(this_device())), mesh=mesh_over())
    for function in (lambda: dict(full_tensors(model)), lambda: full_state_dict(model)):
        together()
        with raises_soon(RuntimeError, "0.weight"):
            function()
    with raises_soon(LoadError, "0.weight"):
        load_full_tensors(model, {})
    assert set(finding(model, "ambiguous-names").names) == {"0.weight", "0.bias"}


@on_the_device
def test_fsdp1_tensors_with_colliding_names_are_refused_by_name() -> None:
    for use_orig_params in (True, False):
        options: dict[str, Any] = {"device_id": this_device(), "use_orig_params": use_orig_params}
        model = FullyShardedDataParallel(nn.Sequential(Ambiguous()), **options)
        together()
        with raises_soon(RuntimeError, "0.weight"):
            dict(full_tensors(model))
        with raises_soon(LoadError, "0.weight"):
            load_full_tensors(model, {})


@everywhere
def test_wrappers_leave_names_that_are_one_tensors() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4)).to(this_device())
    model = fully_shard(model, mesh=mesh_over())
    assert set(extracted(model)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert "ambiguous-names" not in kinds(examine(model))


@everywhere
def test_the_report_names_buffers_that_no_checkpoint_has_and_nobody_gave() -> None:
    with torch.device("meta"):
        model = Net()
    for layer in model.layers:
        assert isinstance(layer, Block)
        fully_shard(layer, mesh=mesh_over())
    fully_shard(model, mesh=mesh_over())
    assert "buffers=" in finding(model, "meta").remedy
    model.to_empty(device=this_device())
    for given, named in ((None, ("scratch",)), ({"scratch": torch.ones(2)}, ())):
        report = load_full_tensors(model, on_first(other_tensors()), buffers=given)
        assert report.buffers_not_given == named
    assert model.scratch.eq(1).all()
    assert load_full_tensors(fsdp2(new_net()), other_tensors()).buffers_not_given == ("scratch",)
