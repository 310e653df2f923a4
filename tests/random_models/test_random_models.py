"""Every public function on 160 random models, and on 200 after a step that raised, against what torch itself says of a
twin that went through the same.

What is right comes from torch alone: from ``summon_full_params`` or ``DTensor.full_tensor`` on a second model of that
recipe, since both may put a model into another state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from support.extraction import Tensors
from support.ranks import Setting, device_type, of_all_ranks, on_ranks, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import fsdp_doctor
from random_models.models import Recipe, Strategy, break_off_step, draw, loss_of, make_happen, shard, tree

_CONTEXTS: tuple[Callable[[], Any], ...] = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
# Of dozens of models on a machine that does other things, too.
_SECONDS = 600


def _happened(recipe: Recipe, *, stays_on_device: bool = False) -> nn.Module:
    """The model of a recipe after all that happens to it."""
    model = shard(recipe)
    make_happen(model, recipe)
    if stays_on_device and "to the host" in recipe.happens:
        model.to(this_device())
    return model


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _by_torch(model: nn.Module) -> Tensors:
    """Returns torch's own parameters and persistent buffers; the model may be in another state afterwards."""
    plain = isinstance(model, FullyShardedDataParallel)
    summoned = (
        FullyShardedDataParallel.summon_full_params(model, writeback=False) if plain else contextlib.nullcontext()
    )
    with torch.no_grad(), summoned:
        tensors = {_clean(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
        tensors |= {_clean(name): tensor for name, tensor in model.named_buffers(remove_duplicate=False)}
        return {name: _whole(tensor) for name, tensor in tensors.items() if not name.endswith("scratch")}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        # ``full_tensor`` fails for rows without elements.
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, DTensor):
        tensor = (tensor.to(tensor.device_mesh.device_type) if device_type() != "cpu" else tensor).full_tensor()
    return tensor.detach().to("cpu", copy=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _assert_equal(actual: Tensors, expected: Tensors, what: str) -> None:
    assert sorted(actual) == sorted(expected), f"{what}: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in actual.items():
        kind = (tensor.shape, tensor.dtype)
        assert kind == (expected[name].shape, expected[name].dtype), f"{what}: {name} is {kind}"
        assert torch.equal(_bits(tensor), _bits(expected[name])), f"{what}: {name} has other values"


def _cast(tensors: Tensors) -> Tensors:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}


def _check_extraction(model: nn.Module, expected: Tensors, context: Callable[[], Any]) -> None:
    with context():
        _assert_equal(dict(fsdp_doctor.full_tensors(model, bucket_bytes=512)), expected, "full_tensors")
        rounded = dict(fsdp_doctor.full_tensors(model, dtype=torch.bfloat16))
        _assert_equal(rounded, _cast(expected), "full_tensors(dtype=bfloat16)")
        collected = fsdp_doctor.full_state_dict(model)
        _assert_equal(collected, expected if this_rank() == 0 else {}, "full_state_dict")
        info = {name: (one.shape, one.dtype) for name, one in fsdp_doctor.weights_info(model).items()}
        assert info == {name: (t.shape, t.dtype) for name, t in expected.items()}, "weights_info"
        shards = list(fsdp_doctor.local_shards(model))
        assert [shard.name for shard in shards] == list(info), "local_shards"
        for part in shards:
            right = part.place.of(expected[part.name])
            assert torch.equal(_bits(part.tensor), _bits(right)), f"local_shards: {part.name} has other values"
        found = fsdp_doctor.fingerprint(model)
        differences = fsdp_doctor.compare_fingerprints(found, fsdp_doctor.fingerprint_tensors(expected))
        assert not differences, f"fingerprint: {differences}"
        fsdp_doctor.examine(model)


def _other(recipe: Recipe, expected: Tensors) -> Tensors:
    """Other values under the same names; what is tied stays tied."""
    generator = torch.Generator().manual_seed(recipe.seed)
    by_tie: dict[Any, torch.Tensor] = {}
    ties = {name: id(t) for name, t in tree(recipe.strategy, recipe.seed).state_dict(keep_vars=True).items()}
    other = {}
    for name, tensor in expected.items():
        if ties[name] not in by_tie:
            values = torch.randn(tensor.shape, generator=generator) * 3
            by_tie[ties[name]] = values.to(tensor.dtype)
        other[name] = by_tie[ties[name]]
    return other


@contextlib.contextmanager
def _directory() -> Iterator[pathlib.Path]:
    """Yields a directory for all ranks, which are on this machine."""
    with tempfile.TemporaryDirectory() as own:
        first: str = of_all_ranks(own)[0]
        yield pathlib.Path(first)
        together()


def _check_loading(recipe: Recipe, expected: Tensors, context: Callable[[], Any]) -> None:
    """Loads from one of the four kinds of source for each seed."""
    other = _other(recipe, expected)
    model = _happened(recipe)
    with _directory() as directory:
        sources: tuple[Callable[[], Any], ...] = (
            lambda: other,
            lambda: other if this_rank() == 0 else None,
            lambda: iter(other.items()),
            lambda: directory,
        )
        if this_rank() == 0:
            save_file({name: tensor.clone() for name, tensor in other.items()}, directory / "model.safetensors")
        together()
        with context():
            fsdp_doctor.load_full_tensors(model, sources[recipe.seed % 4](), bucket_bytes=512)
    if "to the host" in recipe.happens:
        model.to(this_device())
    plain = tree(recipe.strategy, recipe.seed)
    plain.load_state_dict(other)
    with torch.no_grad():
        loss, right = loss_of(model), loss_of(plain.to(this_device()))
    assert torch.equal(_bits(loss), _bits(right)), f"the forward after a load gives {loss}, not {right}"
    _assert_equal(_by_torch(model), other, "load_full_tensors")


def _check(strategy: Strategy, seeds: Iterable[int]) -> None:
    for recipe in (draw(strategy, seed) for seed in seeds):
        context = _CONTEXTS[recipe.seed % len(_CONTEXTS)]
        try:
            expected = _by_torch(_happened(recipe, stays_on_device=True))
            _check_extraction(_happened(recipe), expected, context)
            _check_loading(recipe, expected, context)
        except BaseException as error:
            raise AssertionError(f"{recipe} in {context.__name__}: {type(error).__name__}: {error}") from error


@on_ranks(Setting("emulated", 2), Setting("cpu", 4), seconds=_SECONDS)
def test_every_public_function_is_right_on_random_models_of_fsdp2() -> None:
    _check("fsdp2", range(40) if device_type() == "cpu" else range(40, 80))


@on_ranks(Setting("emulated", 2), seconds=_SECONDS)
def test_every_public_function_is_right_on_random_models_of_fsdp1() -> None:
    _check("fsdp1", range(40))


@on_ranks(Setting("emulated", 2), seconds=_SECONDS)
def test_public_functions_are_right_on_random_fsdp1_models_with_original_parameters() -> None:
    _check("fsdp1-orig", range(40))


def _list_shards(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer has, which a model that shows unsharded ones does not have."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _train(model: nn.Module, shards: list[tuple[str, nn.Parameter]]) -> Tensors:
    """Takes a step of SGD, and returns this rank's gradients, which the step drops."""
    optimizer = torch.optim.SGD([parameter for _, parameter in shards], lr=0.01)
    loss_of(model).backward()
    gradients = {name: shard.grad for name, shard in shards if shard.grad is not None}
    found = {n: (g.to_local() if isinstance(g, DTensor) else g).detach().clone() for n, g in gradients.items()}
    optimizer.step()
    optimizer.zero_grad()
    return found


def _check_raised(strategy: Strategy, seeds: Iterable[int]) -> None:
    """Every function right after a step that raised, then the load of a checkpoint, and two steps."""
    for recipe in (draw(strategy, seed) for seed in seeds):
        # A model that lies on the host cannot take the step that raises.
        recipe = dataclasses.replace(recipe, happens=tuple(h for h in recipe.happens if h != "to the host"))
        part: Literal["forward", "backward"] = "forward" if recipe.seed % 2 else "backward"
        try:
            expected = _by_torch(_happened(recipe))
            model, twin = _happened(recipe), _happened(recipe)
            shards, of_twin = _list_shards(model), _list_shards(twin)
            break_off_step(model, recipe, part)
            _check_extraction(model, expected, contextlib.nullcontext)
            with _directory() as directory:
                fsdp_doctor.save_full_tensors(model, directory / "saved", names="model")
                other = _other(recipe, expected)
                if strategy != "fsdp2" and part == "backward":
                    assert "step-open" in [finding.kind for finding in fsdp_doctor.examine(model).bad]
                    with pytest.raises(fsdp_doctor.LoadError):
                        fsdp_doctor.load_full_tensors(model, other)
                    # The remedy: what was saved in this state, in a model that is built again.
                    model = shard(recipe)
                    fsdp_doctor.load_full_tensors(model, directory / "saved")
                    _assert_equal(_by_torch(model), expected, "the model that was built again")
                    continue
            for _, parameter in shards:
                parameter.grad = None
            sources = (other, other if this_rank() == 0 else None)
            fsdp_doctor.load_full_tensors(model, sources[recipe.seed // 2 % 2], bucket_bytes=512)
            fsdp_doctor.load_full_tensors(twin, other, bucket_bytes=512)
            for number in range(2):
                _assert_equal(_train(model, shards), _train(twin, of_twin), f"the gradients of step {number}")
            _assert_equal(_by_torch(model), _by_torch(twin), "the weights after two steps")
        except BaseException as error:
            raise AssertionError(f"{recipe} after a {part} that raised: {type(error).__name__}: {error}") from error


@on_ranks(Setting("emulated", 2), Setting("cpu", 2), seconds=_SECONDS)
def test_every_function_is_right_on_fsdp2_after_a_raised_step() -> None:
    _check_raised("fsdp2", range(50) if device_type() == "cpu" else range(50, 100))


@on_ranks(Setting("emulated", 2), seconds=_SECONDS)
def test_every_function_is_right_on_fsdp1_after_a_raised_step() -> None:
    _check_raised("fsdp1", range(50))


@on_ranks(Setting("emulated", 2), seconds=_SECONDS)
def test_every_function_is_right_on_original_parameters_after_a_raised_step() -> None:
    _check_raised("fsdp1-orig", range(50))
