"""``examine`` on two ranks: what a bad load leaves, and that a good one leaves nothing to find."""

from __future__ import annotations

import types

import torch
from support.examined import (
    HEALTHY,
    PINNED,
    Net,
    equal,
    finding,
    forward,
    fsdp1_model,
    fsdp2_model,
    kinds,
    mesh,
    on_two_ranks,
    train,
)
from support.ranks import this_device
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import examine

_FULL = StateDictOptions(full_state_dict=True)
_OF_LOADS = (
    "meta",
    "optimizer-holds-none",
    "optimizer-holds-some",
    "moments-rounded",
    "untied",
    "replaced",
    "recast",
)


class TyingNet(Net):
    """A net with the words of transformers 5 for its tie."""

    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, *, ties: bool = True) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(tie_word_embeddings=ties)


class OlderTyingNet(TyingNet):
    """With those of transformers 4, which names what is tied, and ties it to the embedding."""

    _tied_weights_keys = ["head.weight"]  # type: ignore[assignment]  # noqa: RUF012

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def sharded(net: Net) -> Net:
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh())
    return fully_shard(net, mesh=mesh())  # type: ignore[return-value]


def kinds_of_loads(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    return [kind for kind in kinds(examine(model, optimizer)) if kind in _OF_LOADS]


def on_meta() -> Net:
    with torch.device("meta"):
        return sharded(Net())


def full_weights() -> dict[str, torch.Tensor]:
    return {name: torch.full(tensor.shape, 0.5) for name, tensor in Net().state_dict().items()}


@on_two_ranks
def test_a_load_in_place_of_the_healthy_models_leaves_nothing_to_find() -> None:
    for name, build in HEALTHY.items():
        model = build()
        optimizer = train(model)
        model.load_state_dict(model.state_dict())
        equal((name, kinds(examine(model, optimizer))), (name, []))


@on_two_ranks
def test_what_a_load_left_on_the_meta_device_is_bad() -> None:
    model = on_meta()
    model.load_state_dict(model.state_dict())
    found = finding(model, "meta")
    equal((found.severity, found.entry), ("bad", "in-place-load-into-meta"))
    assert {"up.weight", "scale", "scratch"} <= set(found.names)
    model = on_meta()
    set_model_state_dict(model, full_weights(), options=_FULL)
    found = finding(model, "meta")
    equal((found.severity, found.entry, found.names), ("bad", "meta-buffers-stay-on-meta", ("scratch",)))
    model.scratch = torch.ones(4, device=this_device())
    assert "meta" not in kinds(examine(model))


@on_two_ranks
def test_an_optimizer_from_before_an_assigning_load_holds_none_and_is_bad() -> None:
    for build in (fsdp2_model, lambda: fsdp2_model(offload_policy=PINNED)):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_state_dict(model.state_dict(), assign=True)
        found = finding(model, "optimizer-holds-none", optimizer)
        equal((found.severity, found.entry), ("bad", "assign-leaves-the-optimizer-behind"))
        new = torch.optim.AdamW(model.parameters())
        equal([kind for kind in kinds(examine(model, new)) if kind.startswith("optimizer")], [])


@on_two_ranks
def test_an_optimizer_of_the_unsharded_model_holds_none_and_one_of_masters_is_no_finding() -> None:
    net = Net().to(this_device())
    optimizer = torch.optim.AdamW(net.parameters())
    equal(finding(sharded(net), "optimizer-holds-none", optimizer).severity, "bad")
    model = fsdp2_model().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    equal(kinds_of_loads(model, torch.optim.AdamW(masters)), [])


@on_two_ranks
def test_two_optimizers_that_share_the_parameters_are_a_hazard_each_and_frozen_ones_need_none() -> None:
    for model in (fsdp2_model(), fsdp1_model(use_orig_params=True)):
        parameters = list(model.parameters())
        first, second = torch.optim.AdamW(parameters[:2]), torch.optim.SGD(parameters[2:])
        for optimizer in (first, second):
            equal(finding(model, "optimizer-holds-some", optimizer).severity, "hazard")
            equal(examine(model, optimizer).bad, ())
        for parameter in parameters[:2]:
            parameter.requires_grad_(False)
        equal(kinds_of_loads(model, second), [])


@on_two_ranks
def test_between_forward_and_backward_an_optimizer_holds_what_the_modules_do_not_show() -> None:
    for build in (fsdp2_model, lambda: fsdp1_model(use_orig_params=True), lambda: fsdp1_model(use_orig_params=False)):
        model = build()
        optimizer = train(model)
        loss = forward(model)
        equal(kinds_of_loads(model, optimizer), [])
        loss.backward()


@on_two_ranks
def test_moments_of_fewer_bits_than_their_parameter_are_a_hazard_and_others_are_no_finding() -> None:
    model = fsdp2_model()
    optimizer = train(model)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    equal(kinds(examine(model, optimizer)), [])
    for dtype, expected in ((torch.float64, []), (torch.bfloat16, ["moments-rounded"])):
        for entries in optimizer.state.values():
            entries["exp_avg"] = entries["exp_avg"].to(dtype)
        equal(kinds(examine(model, optimizer)), expected)
    found = finding(model, "moments-rounded", optimizer)
    equal((found.severity, found.entry), ("hazard", "moments-take-the-parameters-dtype"))
    assert "(exp_avg)" in found.sentence


@on_two_ranks
def test_a_tie_that_a_load_has_broken_is_a_hazard_where_the_configuration_ties() -> None:
    for net_type in (TyingNet, OlderTyingNet):
        model = sharded(net_type().to(this_device()))
        equal(kinds(examine(model)), [])
        model.load_state_dict(model.state_dict(), assign=True)
        found = finding(model, "untied")
        equal((found.severity, found.names), ("hazard", ("head.weight", "embed.weight")))
        equal(finding(nn.ModuleDict({"inner": model}), "untied").names, ("inner.head.weight", "inner.embed.weight"))
        model.head.weight = model.embed.weight
        equal(kinds(examine(model)), [])
    model = sharded(TyingNet(ties=False).to(this_device()))
    model.load_state_dict(model.state_dict(), assign=True)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_what_is_tied_or_untied_after_the_first_forward_is_bad_for_fsdp2_gathers_the_old_weight() -> None:
    model = fsdp2_model()
    train(model)
    model.up.bias = model.embed.weight
    equal(finding(model, "replaced").names, ("up.bias",))
    model = fsdp2_model()
    train(model)
    was = model.head.weight
    model.head.weight = nn.Parameter(was.detach().clone())
    found = finding(model, "replaced")
    equal((found.severity, found.names), ("bad", ("head.weight",)))
    forward(model).backward()
    assert model.head.weight is was
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_what_is_assigned_before_the_first_forward_or_by_a_load_is_gathered_and_no_finding() -> None:
    net = Net()
    net.head.weight = nn.Parameter(torch.ones(4, 4))
    model = sharded(net.to(this_device()))
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())
    equal(kinds_of_loads(model), [])
    train(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    equal(kinds_of_loads(model), [])


@on_two_ranks
def test_a_cast_after_the_first_forward_is_bad_and_one_before_it_is_not() -> None:
    model = fsdp2_model()
    model.double()
    equal(kinds_of_loads(model), [])
    model = fsdp2_model()
    train(model)
    model.down.half()
    found = finding(model, "recast")
    equal((found.severity, "down.weight" in found.names, "up.weight" in found.names), ("bad", True, False))
    model.down.float()
    equal(kinds_of_loads(model), [])
