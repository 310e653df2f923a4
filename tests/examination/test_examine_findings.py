"""``examine`` on two ranks: what is found in models that are not as they should be, and that nothing else is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.examined import (
    EVEN,
    HEALTHY,
    PINNED,
    UNEVEN,
    UNPINNED,
    Net,
    equal,
    finding,
    forward,
    fsdp1_model,
    fsdp2_model,
    kinds,
    mesh,
    on_two_ranks,
    row,
    train,
    trained,
)
from support.ranks import this_device
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy, fully_shard

from fsdp_doctor import examine
from fsdp_doctor.case import offloading

# Where tensors lie


def moved(model: nn.Module, device: Any = None) -> nn.Module:
    return model.to(device or this_device())


def with_buffer_on_cpu(model: Any) -> nn.Module:
    model.scratch = model.scratch.cpu()
    return model


def with_ignored_on_cpu() -> nn.Module:
    net = Net().to(this_device())
    net.up.weight.data = net.up.weight.data.cpu()
    model = fully_shard(net, mesh=mesh(), ignored_params={net.up.weight})
    net.up.weight.data = net.up.weight.data.cpu()
    return model


FLAT = ("flat_param", "up.flat_param")
FSDP2 = ("up.weight", "up.bias", "down.weight", "down.bias", "embed.weight")
NO_SHARD = {"sharding_strategy": ShardingStrategy.NO_SHARD}
# (the model, the kind of its finding, its severity, the entry in the catalogue, the tensors)
FOUND: list[tuple[Callable[[], nn.Module], str, str, str, tuple[str, ...]]] = [
    (
        lambda: moved(fsdp2_model(offload_policy=UNPINNED)),
        *("policy-shards-off-cpu", "bad", "fsdp2-params-not-on-cpu-at-lazy-init", FSDP2),
    ),
    (
        lambda: moved(trained(fsdp2_model(offload_policy=UNPINNED))),
        *("policy-shards-off-cpu", "bad", "fsdp2-unpinned-policy-moved-then-trained", FSDP2),
    ),
    (
        lambda: moved(fsdp2_model(offload_policy=PINNED), "cpu"),
        *("buffers-left-behind", "bad", "fsdp2-buffers-left-on-cpu", ("scale", "scratch")),
    ),
    (
        lambda: with_buffer_on_cpu(fsdp2_model()),
        *("buffers-left-behind", "bad", "fsdp2-buffers-left-on-cpu", ("scratch",)),
    ),
    (with_ignored_on_cpu, "ignored-away", "hazard", "", ("up.weight",)),
    (
        lambda: moved(trained(fsdp1_model(**NO_SHARD)), "cpu"),
        *("fsdp1-away", "bad", "fsdp1-manual-offload-then-state-dict", FLAT),
    ),
    *(
        (build, "half-moved", "bad", entry, FLAT)
        for original in (False, True)
        for build, entry in (
            (
                lambda o=original: moved(trained(fsdp1_model(use_orig_params=o, cpu_offload=CPUOffload(True)))),
                "fsdp1-moved-with-policy-offload",
            ),
            (
                lambda o=original: moved(trained(fsdp1_model(use_orig_params=o)), "cpu"),
                "fsdp1-manual-offload-then-state-dict",
            ),
        )
    ),
]


@on_two_ranks
def test_a_model_with_scattered_parts_is_found_with_its_tensors_and_entry() -> None:
    for build, kind, *expected in FOUND:
        found = finding(build(), kind)
        equal((kind, found.severity, found.entry, found.names), (kind, *expected))


@on_two_ranks
def test_a_module_moved_under_a_pinning_policy_is_half_moved_until_returned() -> None:
    for model in (fsdp2_model(offload_policy=PINNED), trained(fsdp2_model(offload_policy=PINNED))):
        half = finding(moved(model), "half-moved")
        equal((half.severity, half.entry, half.names), ("bad", "fsdp2-pinned-policy-half-moved", FSDP2))
        state = row(model, "up.weight").state
        equal((state.wrapper_device, state.device.type), (this_device(), "cpu"))
        offloading.unstage(model, this_device(), set(model.modules()))
        equal(kinds(examine(model)), [])


@on_two_ranks
def test_a_manual_offload_is_a_note_under_fsdp2_and_bad_under_fsdp1() -> None:
    model: Any = trained(fsdp2_model())
    offloading.offload(model, non_blocking=False)
    equal([(one.kind, one.severity) for one in examine(model, raise_on_bad=True).findings], [("offloaded", "note")])
    assert "2 buffers" in finding(model, "offloaded").sentence
    model.up.to(this_device())
    partly = finding(model, "partly-moved")
    equal((partly.severity, partly.names), ("bad", FSDP2[2:]))
    offloading.load(model, this_device(), non_blocking=False)
    equal(kinds(examine(model)), [])
    for use_orig_params in (False, True):
        model = trained(fsdp1_model(use_orig_params=use_orig_params))
        offloading.offload(model, non_blocking=False)
        away = finding(model, "fsdp1-away")
        equal((away.severity, away.entry, away.names), ("bad", "fsdp1-manual-offload-then-state-dict", FLAT))
        offloading.load(model, this_device(), non_blocking=False)
        equal(kinds(examine(model)), [])


@on_two_ranks
def test_a_given_optimizer_with_state_away_from_its_parameters_is_bad() -> None:
    for name, build in HEALTHY.items():
        model = build()
        optimizer = train(model)
        other = torch.device("cpu") if "policy" not in name else this_device()
        for entries in optimizer.state.values():
            entries |= {key: value.to(other) for key, value in entries.items()}
        apart = finding(model, "optimizer-elsewhere", optimizer)
        equal((name, apart.severity, apart.entry), (name, "bad", "optim-on-wrong-device-after-offload"))
        assert "(exp_avg, exp_avg_sq)" in apart.sentence, apart.sentence
        equal((name, kinds(examine(model))), (name, []))


@on_two_ranks
def test_a_nonblocking_copy_is_a_hazard_while_running_and_a_note_afterwards() -> None:
    model = trained(fsdp2_model())
    torch.emulated.synchronize()
    offloading.offload(model, non_blocking=True)
    assert torch.emulated.copies_in_flight() > 0
    copy = finding(model, "copy-outstanding")
    equal((copy.severity, copy.entry), ("hazard", "non-blocking-d2h-read-too-early"))
    assert "has work left" in copy.sentence, copy.sentence
    torch.emulated.synchronize()
    equal(finding(model, "copy-outstanding").severity, "note")


@on_two_ranks
def test_a_copy_on_another_stream_is_neither_seen_nor_waited_for() -> None:
    model = trained(fsdp2_model())
    torch.emulated.synchronize()
    with torch.emulated.stream(torch.emulated.Stream()):
        offloading.offload(model, non_blocking=True)
    in_flight = torch.emulated.copies_in_flight()
    assert in_flight > 0
    copy = finding(model, "copy-outstanding")
    equal((copy.severity, torch.emulated.copies_in_flight()), ("note", in_flight))
    assert "another stream" in copy.sentence, copy.sentence
    torch.emulated.synchronize()


@on_two_ranks
def test_a_nonblocking_offload_of_the_optimizer_is_seen_too() -> None:
    model = fsdp2_model()
    optimizer = train(model)
    torch.emulated.synchronize()
    for entries in optimizer.state.values():
        entries |= {key: value.to("cpu", non_blocking=True) for key, value in entries.items()}
    equal(finding(model, "copy-outstanding", optimizer).severity, "hazard")
    torch.emulated.synchronize()


@on_two_ranks
def test_a_buffer_or_model_on_the_device_of_another_rank_is_bad() -> None:
    """The usual mistake: every rank's buffers on device 0."""
    other = torch.device("emulated", 1 - dist.get_rank())
    model = trained(fsdp2_model())
    model.scale = model.scale.to(other)
    assert "buffers-left-behind" in {finding.kind for finding in examine(model).bad}
    model = trained(fsdp2_model()).to(other)
    assert "elsewhere" in {finding.kind for finding in examine(model).bad}


@on_two_ranks
def test_uneven_shards_and_a_nonblocking_offload_are_a_hazard_together_only() -> None:
    for hidden, non_blocking in ((EVEN, True), (UNEVEN, False), (UNEVEN, True)):
        model = trained(fsdp2_model(hidden))
        torch.emulated.synchronize()
        offloading.offload(model, non_blocking=non_blocking)
        together = hidden == UNEVEN and non_blocking
        equal((hidden, non_blocking, "uneven-nonblocking" in kinds(examine(model))), (hidden, non_blocking, together))
        torch.emulated.synchronize()
    uneven = finding(model, "uneven-nonblocking")
    equal((uneven.severity, uneven.names), ("hazard", ("up.weight", "up.bias")))
    # The rank with the shorter shard has padded it, and lost that it was pinned.
    equal(row(model, "up.weight").state.pinned, dist.get_rank() == 0)


@on_two_ranks
def test_cpu_shards_in_a_group_without_a_cpu_backend_are_a_hazard() -> None:
    # Another name than the other mesh's: torch takes one mesh for an equal one, and with it its group.
    own = DeviceMesh.from_group(dist.new_group(backend="emulated"), "emulated", mesh_dim_names=("alone",))
    offloaded = trained(fsdp2_model(over=own))
    equal(kinds(examine(offloaded)), [])
    offloading.offload(offloaded, non_blocking=False)
    for model in (offloaded, trained(fsdp2_model(over=own, offload_policy=PINNED))):
        alone = finding(model, "no-backend-for-cpu")
        equal((alone.severity, alone.entry), ("hazard", "full-tensor-cpu-shard-nccl-only"))


# What a load has left


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
    """Model that ties as transformers 4 does: it names what is tied, and ties it to the embedding."""

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
def test_an_optimizer_of_the_unsharded_model_is_bad_unlike_master_weights() -> None:
    net = Net().to(this_device())
    optimizer = torch.optim.AdamW(net.parameters())
    equal(finding(sharded(net), "optimizer-holds-none", optimizer).severity, "bad")
    model = fsdp2_model().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    equal(kinds_of_loads(model, torch.optim.AdamW(masters)), [])


@on_two_ranks
def test_an_optimizer_of_only_some_trainable_parameters_is_a_hazard() -> None:
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
def test_a_fitting_optimizer_is_not_reported_between_forward_and_backward() -> None:
    for build in (fsdp2_model, lambda: fsdp1_model(use_orig_params=True), lambda: fsdp1_model(use_orig_params=False)):
        model = build()
        optimizer = train(model)
        loss = forward(model)
        equal(kinds_of_loads(model, optimizer), [])
        loss.backward()


@on_two_ranks
def test_moments_are_a_hazard_only_with_fewer_bits_than_their_parameter() -> None:
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
def test_a_tie_broken_by_loading_is_a_hazard_if_the_configuration_ties() -> None:
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
def test_tying_or_untying_after_the_first_forward_is_found_under_fsdp2() -> None:
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
def test_an_assignment_before_the_first_forward_is_gathered_and_no_finding() -> None:
    net = Net()
    net.head.weight = nn.Parameter(torch.ones(4, 4))
    model = sharded(net.to(this_device()))
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())
    equal(kinds_of_loads(model), [])
    train(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    equal(kinds_of_loads(model), [])


@on_two_ranks
def test_a_cast_is_bad_only_after_the_first_forward() -> None:
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


# How gradients are reduced


def replicated(*, ranks: int) -> Any:
    dims = (ranks, 2 // ranks)
    return fsdp2_model(over=init_device_mesh("emulated", dims, mesh_dim_names=("replicate", "shard")))


@on_two_ranks
def test_unsynchronized_gradients_are_named_until_synchronization_is_enabled_again() -> None:
    for model in (fsdp2_model(), trained(fsdp2_model())):
        model.up.set_requires_gradient_sync(False)
        found = finding(model, "gradients-unsynchronized")
        equal((found.severity, found.names), ("hazard", ("up.weight", "up.bias")))
        model.up.set_requires_gradient_sync(True)
        equal(kinds(examine(model)), [])
    model = trained(fsdp1_model())
    with model.no_sync():
        equal(finding(model, "gradients-unsynchronized").names, ("flat_param", "up.flat_param"))
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_an_all_reduce_that_is_off_is_named_where_there_are_replicas() -> None:
    model = replicated(ranks=2)
    model.set_requires_all_reduce(False)
    equal(len(finding(model, "gradients-unreplicated").names), 5)
    model = fsdp2_model()
    model.set_requires_all_reduce(False)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_a_backward_that_does_not_wait_is_named() -> None:
    model = trained(fsdp2_model())
    model.set_is_last_backward(False)
    equal(finding(model, "backward-open-ended").severity, "hazard")
    model.set_is_last_backward(True)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_another_divisor_than_the_number_of_ranks_is_a_note() -> None:
    model = fsdp2_model()
    model.down.set_gradient_divide_factor(1.0)
    found = finding(model, "gradients-divided")
    equal((found.severity, found.names), ("note", ("down.weight", "down.bias")))
    assert "divided by 1," in found.sentence
    model.down.set_gradient_divide_factor(2.0)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_expert_gradients_may_be_divided_by_the_number_of_all_ranks() -> None:
    """Each expert has had tokens of all ranks under expert parallelism."""
    net = Net().to(this_device())
    fully_shard(net.down, mesh=init_device_mesh("emulated", (1, 2), mesh_dim_names=("efsdp", "ep"))["efsdp"])
    model = fully_shard(net, mesh=mesh())
    model.down.set_gradient_divide_factor(2.0)
    equal(kinds(examine(model)), ["experts-hidden"])
    model.down.set_gradient_divide_factor(4.0)
    equal(finding(model, "gradients-divided").names, ("down.weight", "down.bias"))


@on_two_ranks
def test_trainable_parameters_without_shards_are_named_and_frozen_parameters_are_not() -> None:
    net = Net().to(this_device())
    fully_shard(net.up, mesh=mesh())
    found = finding(net, "gradients-unmanaged")
    equal((found.severity, found.names), ("hazard", ("down.weight", "down.bias", "embed.weight")))
    for module in (net.down, net.embed):
        module.requires_grad_(False)
    equal(kinds(examine(net)), [])
    model = fsdp2_model()
    model.prompt = nn.Parameter(torch.zeros(4, device=this_device()))
    equal(finding(model, "gradients-unmanaged").names, ("prompt",))


@on_two_ranks
def test_what_trains_beside_shards_of_one_rank_is_no_matter() -> None:
    net = Net().to(this_device())
    fully_shard(net.up, mesh=init_device_mesh("emulated", (2, 1), mesh_dim_names=("other", "one"))["one"])
    equal(kinds(examine(net)), [])


def _of_two_dtypes(prepare: Callable[[nn.Module], object]) -> nn.Module:
    net = Net().to(this_device())
    net.up.to(torch.bfloat16)
    prepare(net)
    return fully_shard(net, mesh=mesh())


@on_two_ranks
def test_a_unit_with_two_trainable_dtypes_is_bad_and_its_forward_fails() -> None:
    model = _of_two_dtypes(lambda net: None)
    found = finding(model, "mixed-dtypes")
    equal((found.severity, found.entry, len(found.names)), ("bad", "fsdp2-unit-of-several-dtypes", 5))
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(torch.ones(2, 4, device=this_device()))
    equal(kinds(examine(_of_two_dtypes(lambda net: net.up.requires_grad_(False)))), [])
    equal(kinds(examine(_of_two_dtypes(lambda net: fully_shard(net.up, mesh=mesh())))), [])
