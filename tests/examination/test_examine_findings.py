"""``examine`` on two ranks: what is found in models that are not as they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy, fully_shard

from fsdp_doctor import examine
from fsdp_doctor.case import offloading


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
def test_a_model_whose_parts_lie_apart_is_found_with_its_tensors_and_entry() -> None:
    for build, kind, *expected in FOUND:
        found = finding(build(), kind)
        equal((kind, found.severity, found.entry, found.names), (kind, *expected))


@on_two_ranks
def test_a_module_moved_under_a_pinning_policy_is_half_moved_until_it_is_moved_back() -> None:
    for model in (fsdp2_model(offload_policy=PINNED), trained(fsdp2_model(offload_policy=PINNED))):
        half = finding(moved(model), "half-moved")
        equal((half.severity, half.entry, half.names), ("bad", "fsdp2-pinned-policy-half-moved", FSDP2))
        state = row(model, "up.weight").state
        equal((state.wrapper_device, state.device.type), (this_device(), "cpu"))
        offloading.unstage(model, this_device())
        equal(kinds(examine(model)), [])


@on_two_ranks
def test_a_manual_offload_is_a_note_of_fsdp2_and_bad_of_fsdp1_until_it_is_loaded() -> None:
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
def test_optimizer_state_apart_from_its_parameter_is_bad_where_an_optimizer_is_given() -> None:
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
def test_a_nonblocking_copy_is_a_hazard_while_its_stream_works_and_a_note_after() -> None:
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
def test_a_buffer_or_a_model_on_another_device_of_the_kind_is_bad() -> None:
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
def test_shards_on_the_cpu_in_a_group_without_a_backend_for_it_are_a_hazard() -> None:
    # Another name than the other mesh's: torch takes one mesh for an equal one, and with it its group.
    own = DeviceMesh.from_group(dist.new_group(backend="emulated"), "emulated", mesh_dim_names=("alone",))
    offloaded = trained(fsdp2_model(over=own))
    equal(kinds(examine(offloaded)), [])
    offloading.offload(offloaded, non_blocking=False)
    for model in (offloaded, trained(fsdp2_model(over=own, offload_policy=PINNED))):
        alone = finding(model, "no-backend-for-cpu")
        equal((alone.severity, alone.entry), ("hazard", "full-tensor-cpu-shard-nccl-only"))
