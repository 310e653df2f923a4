"""Full optimizer states into the optimizers of sharded models: training goes on as if it had never stopped."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extraction import all_trainable, fsdp1, fsdp2, mesh_over, new_net, on_the_device, raises_soon
from support.loading import BUCKET_BYTES, everywhere, local_of, on_first, on_four
from support.optimizers import Gathering, Local
from support.ranks import Setting, device_type, on_ranks, this_device, this_rank
from support.saving import new_directory
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from fsdp_doctor import LoadError, full_state_dict, load_full_tensors, load_optimizer_state, save_optimizer_state

_FULL = StateDictOptions(full_state_dict=True)
_DIMS = {"empty": False}


def _whole(source: Any) -> Any:
    return source


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **{"lr": 0.01, **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(10 * seed + this_rank())
    tokens = torch.randint(0, 20, (2, 5), generator=generator).to(this_device())
    loss = model(tokens).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _sharded2(**options: Any) -> nn.Module:
    return fsdp2(new_net(**_DIMS), **options)


def _sharded1(*, use_orig_params: bool, **options: Any) -> nn.Module:
    net = new_net(**_DIMS)
    return fsdp1(net if use_orig_params else all_trainable(net), use_orig_params=use_orig_params, **options)


ON_DEVICE: dict[str, Callable[[], nn.Module]] = {
    "policy": lambda: _sharded2(offload_policy=CPUOffloadPolicy()),
    "fsdp1": lambda: _sharded1(use_orig_params=False),
    "fsdp1-orig": lambda: _sharded1(use_orig_params=True),
    "fsdp1, offloaded": lambda: _sharded1(use_orig_params=False, cpu_offload=CPUOffload(offload_params=True)),
    "fsdp1-orig, offloaded": lambda: _sharded1(use_orig_params=True, cpu_offload=CPUOffload(offload_params=True)),
}


def full_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gathers the full state on every rank, on the host."""
    state = get_optimizer_state_dict(model, optimizer, options=_FULL)
    on_host = {n: {k: v.cpu() if torch.is_tensor(v) else v for k, v in e.items()} for n, e in state["state"].items()}
    return {"state": on_host, "param_groups": state["param_groups"]}


def assert_same_state(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """Compares this rank's tensors one by one: dtype, device and bits; and the options."""
    for ours, theirs in zip(actual.param_groups, expected.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        for one, other in zip(ours["params"], theirs["params"], strict=True):
            left, right = actual.state.get(one, {}), expected.state.get(other, {})
            assert sorted(left) == sorted(right), (sorted(left), sorted(right))
            for key, value in right.items():
                assert type(left[key]) is type(value), key
                if not isinstance(value, torch.Tensor):
                    assert left[key] == value, key
                    continue
                found, wanted = local_of(left[key]), local_of(value)
                assert (found.dtype, found.device, found.shape) == (wanted.dtype, wanted.device, wanted.shape), key
                assert torch.equal(found, wanted), key


def _resumed(build: Callable[[], nn.Module], source: Callable[[Any], Any], *, used: bool) -> None:
    model = build()
    optimizer = adamw(model, weight_decay=0.3)
    for seed in range(2):
        step(model, optimizer, seed)
    weights, state = full_state_dict(model, ranks="all"), full_state_of(model, optimizer)
    other = build()
    fresh = adamw(other, lr=0.5)
    if used:
        step(other, fresh, 9)
    load_full_tensors(other, source(weights), bucket_bytes=BUCKET_BYTES)
    kept = copy.deepcopy(state["param_groups"])
    report = load_optimizer_state(other, fresh, source(state), bucket_bytes=BUCKET_BYTES)
    assert (report.missing, report.superfluous, report.without_state) == ((), (), ())
    assert state["param_groups"] == kept
    assert_same_state(fresh, optimizer)
    assert step(model, optimizer, 5) == step(other, fresh, 5)
    assert_same_state(fresh, optimizer)


@everywhere
def test_training_goes_on_from_a_full_state() -> None:
    for source, used in itertools.product((on_first, _whole), (False, True)):
        _resumed(_sharded2, source, used=used)
    for build in ON_DEVICE.values() if device_type() != "cpu" else ():
        _resumed(build, on_first, used=False)
        _resumed(build, _whole, used=True)


@on_the_device
def test_the_callers_grad_and_inference_modes_have_no_say() -> None:
    model, optimizer, state = _trained()
    weights = full_state_dict(model, ranks="all")
    losses = []
    for mode, source in itertools.product((torch.enable_grad, torch.no_grad, torch.inference_mode), (on_first, _whole)):
        other = _sharded2()
        fresh = adamw(other)
        with mode():
            load_full_tensors(other, source(weights))
            load_optimizer_state(other, fresh, source(state))
        assert_same_state(fresh, optimizer)
        losses.append(step(other, fresh, 5))
    assert losses == [step(model, optimizer, 5)] * len(losses)


@on_four
def test_every_replica_of_hsdp_goes_on() -> None:
    for source in (on_first, _whole):
        _resumed(lambda: fsdp2(new_net(**_DIMS), mesh_over(2, 2)), source, used=False)


@on_ranks(Setting("emulated", 1))
def test_a_shard_group_of_one_goes_on() -> None:
    for build in (_sharded2, *ON_DEVICE.values()):
        _resumed(build, _whole, used=False)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = _sharded2()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    return model, optimizer, full_state_of(model, optimizer)


@everywhere
def test_moments_of_another_dtype_than_their_parameter_are_refused_unless_asked_for() -> None:
    model = fsdp2(new_net(**_DIMS).to(torch.bfloat16))
    optimizer = adamw(model)
    _, _, state = _trained()
    with pytest.raises(LoadError, match=r"is torch\.float32 in the source, but the parameter is torch\.bfloat16"):
        load_optimizer_state(model, optimizer, on_first(state))
    assert not optimizer.state
    load_optimizer_state(model, optimizer, on_first(state), dtype="cast")
    assert {local_of(s["exp_avg"]).dtype for s in optimizer.state.values()} == {torch.bfloat16}
    load_optimizer_state(model, optimizer, on_first(state), dtype="source")
    assert {local_of(s["exp_avg"]).dtype for s in optimizer.state.values()} == {torch.float32}


@on_the_device
def test_state_stays_where_it_lay() -> None:
    model, optimizer, state = _trained()
    for entries in optimizer.state.values():
        entries.update({key: value.to("cpu") for key, value in entries.items()})
    load_optimizer_state(model, optimizer, on_first(state))
    devices = {local_of(value).device.type for entries in optimizer.state.values() for value in entries.values()}
    assert devices == {"cpu"}
    assert {local_of(p).device.type for p in model.parameters()} == {device_type()}


@on_the_device
def test_a_capturable_optimizers_steps_are_on_the_device() -> None:
    _, _, state = _trained()
    model = _sharded2()
    optimizer = adamw(model, capturable=True, foreach=False)
    load_optimizer_state(model, optimizer, on_first(state))
    assert {entries["step"].device for entries in optimizer.state.values()} == {this_device()}
    assert optimizer.param_groups[0]["capturable"]


@everywhere
def test_a_parameter_that_never_had_a_gradient_is_named() -> None:
    model, optimizer, state = _trained()
    del state["state"]["layers.0.gate"]
    report = load_optimizer_state(model, optimizer, on_first(state))
    assert report.without_state == ("layers.0.gate",)
    gate = dict(model.named_parameters())["layers.0.gate"]
    assert gate not in optimizer.state
    step(model, optimizer, 1)


def _without(state: dict[str, Any], name: str) -> None:
    del state["state"][name]
    state["param_groups"][0]["params"].remove(name)


def _with(state: dict[str, Any], name: str) -> None:
    state["state"][name] = dict(next(iter(state["state"].values())))
    state["param_groups"][0]["params"].append(name)


def _entries(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda state: change(state["state"][GATE])


GATE = "layers.0.gate"
# By what the error says, what is changed in the state.
REFUSED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (f"lacks 1 of the optimizer's parameters: {GATE}", lambda state: _without(state, GATE)),
    ("1 parameters that the optimizer does not have: layers.7.gate", lambda state: _with(state, "layers.7.gate")),
    (f"in none of its param groups: {GATE}", lambda state: state["param_groups"][0]["params"].remove(GATE)),
    (f"the source has {GATE} in two param groups", lambda state: state["param_groups"].append({"params": [GATE]})),
    (f"exp_avg of {GATE} has the shape [2, 8]", _entries(lambda e: e.update(exp_avg=e["exp_avg"].repeat(2, 1)))),
    (f"exp_avg of {GATE} is a ndarray in", _entries(lambda e: e.update(exp_avg=e["exp_avg"].numpy()))),
    (f"step of {GATE} is a function in the source", _entries(lambda e: e.update(step=lambda: 3))),
    # With these an optimizer cannot step.
    (f"exp_avg_sq of {GATE}", _entries(lambda e: e.pop("exp_avg_sq"))),
    (f"step of {GATE}", _entries(lambda e: e.pop("step"))),
    (f"max_exp_avg_sq of {GATE}", _entries(lambda e: e.update(max_exp_avg_sq=e["exp_avg"].clone()))),
    (f"exp_avg of {GATE} is NoneType", _entries(lambda e: e.update(exp_avg=None))),
    (f"exp_avg of {GATE} is a number", _entries(lambda e: e.update(exp_avg=0.5))),
    (f"step of {GATE} is NoneType", _entries(lambda e: e.update(step=None))),
    (f"step of {GATE} is str", _entries(lambda e: e.update(step="3"))),
    (f"step of {GATE} is a tensor", _entries(lambda e: e.update(step=torch.ones_like(e["exp_avg"])))),
    (f"{GATE} has an empty state", _entries(lambda e: e.clear())),
]


@everywhere
def test_a_state_that_does_not_fit_is_an_error_and_writes_nothing() -> None:
    """The optimizers are a used one and a fresh one."""
    model, optimizer, state = _trained()
    fresh = adamw(model)
    for (message, spoil), source in itertools.product(REFUSED, (on_first, _whole)):
        spoilt = copy.deepcopy(state)
        spoil(spoilt)
        for target in (optimizer, fresh):
            with raises_soon(LoadError, message, "written nothing"):
                load_optimizer_state(model, target, source(spoilt))
    assert not fresh.state
    assert str(full_state_of(model, optimizer)) == str(state)


@everywhere
def test_state_missing_for_all_parameters_is_an_error_if_optimizers_need_it() -> None:
    model, optimizer, state = _trained()
    for key, others in (("exp_avg_sq", (optimizer,)), ("step", (optimizer, adamw(model)))):
        spoilt = copy.deepcopy(state)
        for entries in spoilt["state"].values():
            del entries[key]
        for one, source in itertools.product(others, (on_first, _whole)):
            with raises_soon(LoadError, key, "written nothing"):
                load_optimizer_state(model, one, source(spoilt))


@everywhere
def test_a_number_of_steps_becomes_what_the_optimizer_has() -> None:
    model, optimizer, state = _trained()
    weights = full_state_dict(model, ranks="all")
    counted = copy.deepcopy(state)
    for index, entries in enumerate(counted["state"].values()):
        # As older versions of torch, and other libraries, save it.
        entries["step"] = (int, float)[index % 2](entries["step"])
    others = []
    for used, source in itertools.product((False, True), (on_first, _whole)):
        other = _sharded2()
        one = adamw(other)
        if used:
            step(other, one, 9)
        load_full_tensors(other, source(weights))
        load_optimizer_state(other, one, source(counted))
        assert_same_state(one, optimizer)
        others.append((other, one))
    assert {step(other, one, 5) for other, one in others} == {step(model, optimizer, 5)}


class _Counting(torch.optim.Optimizer):
    """Optimizer that counts its steps in numbers, as some outside of torch do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad


@everywhere
def test_an_optimizer_that_counts_in_numbers_goes_on_with_numbers() -> None:
    model = _sharded2()
    optimizer = _Counting(p for p in model.parameters() if p.requires_grad)
    for seed in range(3):
        step(model, optimizer, seed)
    state = full_state_of(model, optimizer)
    for make in (int, float, torch.tensor):
        for entries in state["state"].values():
            entries["step"] = make(3)
        other = _sharded2()
        used = _Counting(p for p in other.parameters() if p.requires_grad)
        step(other, used, 9)
        load_optimizer_state(other, used, on_first(state))
        assert_same_state(used, optimizer)


@everywhere
def test_an_optimizer_with_unusual_state_continues_or_asks_which_state_is_whole() -> None:
    for kind, whole in ((Gathering, ("momentum",)), (Local, ())):
        model = _sharded2()
        optimizer = kind(p for p in model.parameters() if p.requires_grad)
        for seed in range(2):
            step(model, optimizer, seed)
        weights = full_state_dict(model, ranks="all")
        with new_directory() as directory:
            save_optimizer_state(model, optimizer, directory)
            state = torch.load(directory / "optimizer.pt", weights_only=True)
        for source, used in itertools.product((on_first, _whole), (False, True)):
            other = _sharded2()
            one = kind(p for p in other.parameters() if p.requires_grad)
            if used:
                step(other, one, 9)
            else:
                with raises_soon(LoadError, "momentum", "whole=", "written nothing"):
                    load_optimizer_state(other, one, source(state))
            load_full_tensors(other, source(weights))
            if used or whole:
                load_optimizer_state(other, one, source(state), whole=None if used else whole)
                assert_same_state(one, optimizer)
                assert step(other, one, 5) == step(model, optimizer, 5)
                assert_same_state(one, optimizer)
                load_full_tensors(model, weights)
                load_optimizer_state(model, optimizer, state)


@everywhere
def test_ranks_that_keep_a_tensor_in_different_ways_are_refused() -> None:
    model = _sharded2()
    optimizer = Gathering((p for p in model.parameters() if p.requires_grad), owners=True)
    step(model, optimizer, 0)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    full = {name: {"momentum": torch.zeros(dict(model.named_parameters())[name].shape)} for name in names}
    with raises_soon(LoadError, "the ranks do not load the same", "whole on each rank", "written nothing"):
        load_optimizer_state(model, optimizer, {"state": full, "param_groups": [{"lr": 0.1, "params": names}]})


@everywhere
def test_other_options_may_come_with_other_state() -> None:
    model = _sharded2()
    optimizer = adamw(model, amsgrad=True)
    step(model, optimizer, 0)
    state = full_state_of(model, optimizer)
    other = _sharded2()
    used = adamw(other)
    step(other, used, 9)
    load_optimizer_state(other, used, on_first(state))
    assert_same_state(used, optimizer)


@everywhere
def test_not_strict_leaves_what_is_missing_and_skips_what_is_superfluous() -> None:
    model, optimizer, state = _trained()
    gate = dict(model.named_parameters())["layers.1.gate"]
    before = local_of(optimizer.state[gate]["exp_avg"]).clone()
    _without(state, "layers.1.gate")
    _with(state, "layers.7.gate")
    report = load_optimizer_state(model, optimizer, on_first(state), strict=False)
    assert (report.missing, report.superfluous) == (("layers.1.gate",), ("layers.7.gate",))
    assert torch.equal(local_of(optimizer.state[gate]["exp_avg"]), before)


@everywhere
def test_another_optimizers_state_is_refused_on_every_rank() -> None:
    model, _, state = _trained()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for other in (torch.optim.SGD(trained, momentum=0.9), torch.optim.RMSprop(trained), torch.optim.Adagrad(trained)):
        for source, strict in itertools.product((on_first, _whole), (True, False)):
            with raises_soon(LoadError, "the state of another optimizer", "have amsgrad, betas", "written nothing"):
                load_optimizer_state(model, other, source(state), strict=strict)
        assert "betas" not in other.param_groups[0]
    older = copy.deepcopy(state)
    for group in older["param_groups"]:
        # As an older torch saves it, with a scheduler's option.
        group.pop("decoupled_weight_decay", None)
        group["initial_lr"] = 0.5
    for like in (torch.optim.AdamW(trained), torch.optim.Adam(trained)):
        load_optimizer_state(model, like, on_first(older))
        assert like.state


@everywhere
def test_an_unknown_kind_of_optimizer_or_source_is_refused_on_every_rank() -> None:
    model, _, state = _trained()
    parameters = [p for p in model.parameters() if p.requires_grad]
    grouped = torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}])
    fresh = adamw(model)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (adamw(new_net()), state, "that the model does not have"),
        (torch.optim.AdamW(parameters[: 2 + this_rank()]), state, "do not load the same"),
        (fresh, {"state": {0: {}}, "param_groups": [{"params": [0]}]}, "get_optimizer_state_dict"),
        (grouped, state, "the param groups differ"),
    ]
    for optimizer, source, words in refused:
        with raises_soon(LoadError, words):
            load_optimizer_state(model, optimizer, on_first(source))
    with raises_soon(TypeError, "the optimizer must be"):
        load_optimizer_state(model, None, {})  # type: ignore[arg-type]
    with raises_soon(TypeError, "not the path step-1/optimizer.pt: pass torch.load('step-1/optimizer.pt', mmap=True"):
        load_optimizer_state(model, fresh, "step-1/optimizer.pt")  # type: ignore[arg-type]
    for entries, groups in (([1], []), ({}, 3), ({}, [{}]), ({}, [1]), ({}, [{"params": None}])):
        for source in (on_first, _whole):
            kind = LoadError if source is on_first and this_rank() else TypeError
            with raises_soon(kind, "its state must be a mapping, and its param_groups a list"):
                load_optimizer_state(model, fresh, source({"state": entries, "param_groups": groups}))
    assert not fresh.state


@everywhere
def test_ranks_with_states_that_differ_beyond_tensors_see_the_first_difference() -> None:
    model, _, state = _trained()
    fresh = adamw(model)
    differences: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda state: state["param_groups"][0].update(lr=0.25), "param group 0 with lr = 0.25"),
        (_entries(lambda e: e.update(step=torch.tensor(4.0))), "4.0"),
        (_entries(lambda e: e.pop("exp_avg_sq")), f"exp_avg_sq of {GATE}"),
    ]
    for change, words in differences:
        own = copy.deepcopy(state)
        if this_rank() == 1:
            change(own)
        with raises_soon(LoadError, "the ranks do not load the same", words, "written nothing"):
            load_optimizer_state(model, fresh, own)
    assert not fresh.state
