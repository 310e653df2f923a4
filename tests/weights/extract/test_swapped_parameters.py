"""FSDP2 parameters that got other memory after the first forward: what an extraction yields, and a load fills, is what
the next forward uses, or it is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from support.extraction import UNEVEN, Tensors, assert_same, extracted, fsdp2, new_net, raises_soon, tensors_of
from support.loading import everywhere, on_first, other_tensors
from support.ranks import device_type, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_doctor import (
    LoadError,
    examine,
    fingerprint,
    full_state_dict,
    full_tensors,
    load_full_tensors,
    local_shards,
    weights_info,
)

_DIMS = {**UNEVEN, "empty": False}


def _own_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _local_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter._local_tensor = parameter._local_tensor.clone()


def _cast_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def _assigned_by_a_load(model: nn.Module) -> None:
    model.load_state_dict({name: t.detach().clone() for name, t in model.state_dict().items()}, assign=True)
    model.head.weight = model.embed.weight


def _replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


@torch.no_grad()
def _swapped(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


# Of what torch looks at again: it gathers from the parameters that the modules have.
FOLLOWED: tuple[Callable[[nn.Module], None], ...] = (_own_data, _cast_and_back, _assigned_by_a_load)
MOVED: tuple[Callable[[nn.Module], None], ...] = (_local_tensors, _swapped)
EXTRACTIONS: tuple[Callable[[nn.Module], Any], ...] = (
    lambda model: dict(full_tensors(model)),
    full_state_dict,
    lambda model: list(local_shards(model)),
    fingerprint,
    weights_info,
)


def _policies() -> list[dict[str, Any]]:
    if device_type() == "cpu":
        return [{}, {}]
    return [{}, *({"offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)} for pin_memory in (True, False))]


def _computed(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(10, device=this_device()).view(2, 5)
    return model(tokens)


def _used(**options: Any) -> nn.Module:
    """Returns a model after a forward and a backward."""
    model = fsdp2(new_net(**_DIMS), **options)
    _computed(model).sum().backward()
    model.zero_grad()
    return model


def _forward_of(tensors: Tensors, **options: Any) -> torch.Tensor:
    """Computes the forward of a model that had these weights before it was sharded."""
    net = new_net(**_DIMS)
    net.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        return _computed(fsdp2(net, **options))


@everywhere
def test_a_load_after_a_change_is_what_the_next_forward_uses() -> None:
    expected = other_tensors(**_DIMS)
    sources = itertools.cycle((on_first, lambda tensors: tensors))
    for options in _policies():
        computed = _forward_of(expected, **options)
        for change, source in zip((*FOLLOWED, *MOVED), sources, strict=False):
            model = _used(**options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            change(model)
            load_full_tensors(model, source(expected))
            assert_same(extracted(model), expected)
            with torch.no_grad():
                assert torch.equal(_computed(model), computed), change
            assert_same(extracted(model), expected)
            if change in MOVED:
                _computed(model).sum().backward()
                optimizer.step()
                assert not torch.equal(extracted(model)["large.weight"].cpu(), expected["large.weight"])


@everywhere
def test_a_load_into_parameters_unknown_to_fsdp2_is_refused_by_name() -> None:
    expected = other_tensors(**_DIMS)
    for options in _policies():
        for source in (on_first, lambda tensors: tensors):
            model = _used(**options)
            _replaced(model.layers[0].up)
            before = {name: p.to_local().clone() for name, p in model.named_parameters()}
            with raises_soon(LoadError, "layers.0.up.weight", "written nothing"):
                load_full_tensors(model, source(expected))
            assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())
    model = _used()
    if this_rank() == 0:
        _replaced(model.layers[0].up)
    with raises_soon(LoadError, "layers.0.up.weight"):
        load_full_tensors(model, expected)


@everywhere
def test_a_parameter_swapped_for_another_layout_is_refused_by_name() -> None:
    model = _used()
    parameter = model.layers[0].up.bias
    with torch.no_grad():
        other = parameter.redistribute(placements=[torch.distributed.tensor.Replicate()])
        torch.utils.swap_tensors(parameter, nn.Parameter(other))
    with raises_soon(LoadError, "layers.0.up.bias"):
        load_full_tensors(model, other_tensors(**_DIMS))


@everywhere
def test_an_extraction_after_a_change_matches_the_next_forward_or_is_refused() -> None:
    """Covers a plan that was made before the change, and one that is made after it."""
    expected = tensors_of(new_net(**_DIMS))
    is_kept = itertools.cycle((True, False, False, True, True))
    for options, change in itertools.product(_policies(), (*FOLLOWED, *MOVED, _replaced)):
        model = _used(**options)
        if next(is_kept):
            for extract in EXTRACTIONS:
                extract(model)
        change(model)
        if change in FOLLOWED:
            assert_same(extracted(model), expected)
            continue
        for extract in EXTRACTIONS:
            with raises_soon(RuntimeError, "embed.weight"):
                extract(model)
            together()
        kind = "memory-replaced" if change in MOVED else "replaced"
        (found,) = [finding for finding in examine(model).findings if finding.kind == kind]
        assert {"embed.weight", "large.weight"} <= set(found.names)


@everywhere
def test_a_change_on_one_rank_keeps_no_other_waiting() -> None:
    for change in (*MOVED, _replaced):
        model = _used()
        extracted(model)
        if this_rank() == 0:
            change(model)
        with raises_soon(RuntimeError, "embed.weight"):
            extracted(model)
        together()
        if change in MOVED:
            load_full_tensors(model, other_tensors(**_DIMS))
            assert_same(extracted(model), other_tensors(**_DIMS))


@everywhere
def test_before_the_first_forward_what_the_modules_have_is_used() -> None:
    expected = other_tensors(**_DIMS)
    computed = _forward_of(expected)
    for change in (*MOVED, _replaced):
        model = fsdp2(new_net(**_DIMS))
        change(model)
        load_full_tensors(model, expected)
        assert_same(extracted(model), expected)
        with torch.no_grad():
            assert torch.equal(_computed(model), computed)
