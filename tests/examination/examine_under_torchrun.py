"""Run under torchrun by test_examine.py, on two ranks of the emulated device: ``examine`` in real states.

Every rank runs the checks in one order; rank 0 prints a line for each, with the reason on every rank where it failed.
Ends with 1 if any failed.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import Examination, ModelIsBad, examine
from fsdp_doctor.case import offloading
from fsdp_doctor.examination import Finding, TensorFacts
from fsdp_doctor.fsdp import fsdp2

CHECKS: dict[str, Callable[[], None]] = {}
EVEN, UNEVEN = 6, 7


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# The model


class Net(nn.Module):
    """A tied pair in one unit, a buffer that a state dict has and one that it has not."""

    def __init__(self, hidden: int = EVEN) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(self.down(self.up(hidden)) * self.scale) * self.scratch)


def device() -> torch.device:
    return torch.device("emulated", dist.get_rank())


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("emulated", (2,), mesh_dim_names=("fsdp",))


def fsdp2_model(hidden: int = EVEN, *, over: DeviceMesh | None = None, **options: Any) -> nn.Module:
    net = Net(hidden)
    if "offload_policy" not in options:
        net = net.to(device())
    over = over or mesh()
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=over, **options)
    return fully_shard(net, mesh=over, **options)


def fsdp1_model(**options: Any) -> nn.Module:
    net = Net()
    net.up = FullyShardedDataParallel(net.up, device_id=device(), **options)
    return FullyShardedDataParallel(net, device_id=device(), **options)


PINNED, UNPINNED = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)
HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": fsdp2_model,
    "fsdp2 uneven": lambda: fsdp2_model(UNEVEN),
    "fsdp2 policy": lambda: fsdp2_model(offload_policy=PINNED),
    "fsdp2 policy uneven": lambda: fsdp2_model(UNEVEN, offload_policy=PINNED),
    "fsdp2 policy unpinned": lambda: fsdp2_model(offload_policy=UNPINNED),
    "hsdp": lambda: fsdp2_model(over=init_device_mesh("emulated", (1, 2), mesh_dim_names=("replicate", "shard"))),
    "size1": lambda: fsdp2_model(over=init_device_mesh("emulated", (2, 1), mesh_dim_names=("replicate", "shard"))),
    "fsdp1": lambda: fsdp1_model(use_orig_params=False),
    "fsdp1-orig": lambda: fsdp1_model(use_orig_params=True),
    "fsdp1 no shard": lambda: fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1 no shard policy": lambda: fsdp1_model(
        sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True)
    ),
    "fsdp1 policy": lambda: fsdp1_model(use_orig_params=False, cpu_offload=CPUOffload(True)),
    "fsdp1-orig policy": lambda: fsdp1_model(use_orig_params=True, cpu_offload=CPUOffload(True)),
}


def train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4, device=device())).sum()


def trained(model: nn.Module) -> nn.Module:
    train(model)
    return model


def kinds(examination: Examination, severity: str = "") -> list[str]:
    return [finding.kind for finding in examination.findings if severity in ("", finding.severity)]


def finding(model: nn.Module, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Finding:
    found = examine(model, optimizer)
    (one,) = [finding for finding in found.findings if finding.kind == kind] or [None]
    assert one is not None, f"{kind} is not among {kinds(found)}"
    return one


def row(model: nn.Module, name: str) -> TensorFacts:
    found = examine(model)
    (one,) = [row for row in found.parameters + found.buffers if row.name == name]
    return one


def equal(actual: object, expected: object) -> None:
    assert actual == expected, f"{actual!r} is not {expected!r}"


# What is healthy


@check
def nothing_is_found_in_a_healthy_model_fresh_trained_and_between_forward_and_backward() -> None:
    for name, build in HEALTHY.items():
        model = build()
        equal((name, "fresh", kinds(examine(model))), (name, "fresh", []))
        optimizer = train(model)
        equal((name, "trained", kinds(examine(model, optimizer, raise_on_bad=True))), (name, "trained", []))
        loss = forward(model)
        equal((name, "after forward", kinds(examine(model, optimizer))), (name, "after forward", []))
        loss.backward()


@check
def the_facts_are_those_of_the_sharded_parameters() -> None:
    model = trained(fsdp2_model(UNEVEN))
    for shown in ("sharded", "unsharded"):
        up = row(model, "up.weight")
        shard = 4 if dist.get_rank() == 0 else 3
        equal((shown, tuple(up.shape), tuple(up.local_shape)), (shown, (7, 4), (shard, 4)))
        state = up.state
        equal((state.kind, state.wrapper_device, state.device), ("fsdp2", device(), device()))
        equal(
            (state.pinned, state.dtype, str(state.placements), state.even),
            (None, torch.float32, "(Shard(dim=0),)", False),
        )
        assert state.mesh is not None
        assert state.unit is not None
        equal((state.mesh.names, state.mesh.shape, state.mesh.carries_cpu), (("fsdp",), (2,), True))
        equal((state.unit.compute_device, state.unit.policy, state.unit.initialized), (device(), False, True))
        equal(row(model, "head.weight").tied_to, "embed.weight")
        equal(row(model, "embed.weight").tied_to, "")
        forward(model)  # The root shows its parameters unsharded from here on.


@check
def a_policy_shows_in_the_facts() -> None:
    model = fsdp2_model(offload_policy=PINNED)
    state = row(model, "up.weight").state
    assert state.unit is not None
    equal((state.device.type, state.pinned, state.policy, state.unit.pins), ("cpu", True, True, True))
    equal(state.unit.initialized, False)
    equal(row(fsdp2_model(offload_policy=UNPINNED), "up.weight").state.pinned, False)


@check
def an_fsdp1_unit_is_one_row_with_the_names_that_it_holds() -> None:
    for use_orig_params in (False, True):
        found = examine(trained(fsdp1_model(use_orig_params=use_orig_params)))
        rows = {row.name: (row.holds, tuple(row.shape), row.tied_to) for row in found.parameters}
        expected = {
            "flat_param": (("down.weight", "down.bias", "embed.weight"), (44,), ""),
            "head.weight": ((), (44,), "embed.weight"),
            "up.flat_param": (("up.weight", "up.bias"), (30,), ""),
        }
        equal(rows, expected)
        equal({row.name for row in found.buffers}, {"scale", "scratch"})


@check
def a_tensor_parallel_model_under_fully_shard_is_read() -> None:
    two = init_device_mesh("emulated", (1, 2), mesh_dim_names=("fsdp", "tp"))
    net = parallelize_module(Net(UNEVEN).to(device()), two["tp"], {"up": ColwiseParallel()})
    model = fully_shard(net, mesh=two["fsdp"])
    state = row(model, "up.weight").state
    assert state.mesh is not None
    equal((state.mesh.names, state.mesh.shape, state.even), (("fsdp", "tp"), (1, 2), False))
    equal(kinds(examine(model)), [])


@check
def ignored_parameters_and_the_meta_device_are_read() -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=mesh(), ignored_params={model.up.weight})
    found = examine(model)
    equal(kinds(found), ["meta"])
    equal(row(model, "up.weight").state.kind, "plain")
    equal(row(model, "down.weight").state.kind, "fsdp2")


@check
def a_model_that_is_not_fsdp_is_said_to_be_none() -> None:
    for model in (Net(), Net().to(device()), DistributedDataParallel(Net())):
        found = examine(model, train_plain(model))
        equal((kinds(found, "note"), found.bad), (["not-fsdp"], ()))
        equal([row.name for row in found.parameters][:2], ["up.weight", "up.bias"])
        assert type(model).__name__ in str(found)


def train_plain(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    return optimizer


# What is found


@check
def a_module_moved_under_a_pinning_policy_is_half_moved_until_it_is_moved_back() -> None:
    for model in (fsdp2_model(offload_policy=PINNED), trained(fsdp2_model(offload_policy=PINNED))):
        model.to(device())
        half = finding(model, "half-moved")
        equal((half.severity, half.entry, len(half.names)), ("bad", "fsdp2-pinned-policy-half-moved", 5))
        state = row(model, "up.weight").state
        equal((state.wrapper_device, state.device.type), (device(), "cpu"))
        offloading.unstage(model, device())
        equal(kinds(examine(model)), [])


@check
def a_module_moved_under_an_unpinned_policy_has_its_shards_off_the_cpu() -> None:
    model = fsdp2_model(offload_policy=UNPINNED)
    model.to(device())
    equal(finding(model, "policy-shards-off-cpu").entry, "fsdp2-params-not-on-cpu-at-lazy-init")
    model = trained(fsdp2_model(offload_policy=UNPINNED))
    model.to(device())
    found = finding(model, "policy-shards-off-cpu")
    equal((found.severity, found.entry), ("bad", "fsdp2-unpinned-policy-moved-then-trained"))


@check
def buffers_on_the_cpu_are_left_behind_under_a_policy_and_beside_shards_on_the_device() -> None:
    model = fsdp2_model(offload_policy=PINNED)
    model.to("cpu")
    left = finding(model, "buffers-left-behind")
    equal((left.severity, left.names, left.entry), ("bad", ("scale", "scratch"), "fsdp2-buffers-left-on-cpu"))
    model = fsdp2_model()
    model.scratch = model.scratch.cpu()
    equal(finding(model, "buffers-left-behind").names, ("scratch",))


@check
def a_manual_offload_of_fsdp2_is_a_note_and_half_of_one_is_bad() -> None:
    model = trained(fsdp2_model())
    offloading.offload(model, non_blocking=False)
    equal([(one.kind, one.severity) for one in examine(model, raise_on_bad=True).findings], [("offloaded", "note")])
    assert "2 buffers" in finding(model, "offloaded").sentence
    model.up.to(device())
    partly = finding(model, "partly-moved")
    equal((partly.severity, partly.names), ("bad", ("down.weight", "down.bias", "embed.weight")))
    offloading.load(model, device(), non_blocking=False)
    equal(kinds(examine(model)), [])


@check
def an_ignored_parameter_on_the_cpu_is_a_hazard() -> None:
    net = Net().to(device())
    net.up.weight.data = net.up.weight.data.cpu()
    model = fully_shard(net, mesh=mesh(), ignored_params={net.up.weight})
    net.up.weight.data = net.up.weight.data.cpu()
    away = finding(model, "ignored-away")
    equal((away.severity, away.names), ("hazard", ("up.weight",)))


@check
def a_manual_offload_of_fsdp1_is_bad_until_it_is_loaded() -> None:
    for use_orig_params in (False, True):
        model = trained(fsdp1_model(use_orig_params=use_orig_params))
        offloading.offload(model, non_blocking=False)
        away = finding(model, "fsdp1-away")
        equal((away.severity, away.entry), ("bad", "fsdp1-manual-offload-then-state-dict"))
        equal(away.names, ("flat_param", "up.flat_param"))
        offloading.load(model, device(), non_blocking=False)
        equal(kinds(examine(model)), [])


@check
def an_fsdp1_model_without_shards_is_away_once_it_was_moved() -> None:
    model = trained(fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD))
    model.to("cpu")
    equal(finding(model, "fsdp1-away").names, ("flat_param", "up.flat_param"))


@check
def an_fsdp1_model_moved_by_to_is_half_moved() -> None:
    for use_orig_params in (False, True):
        model = trained(fsdp1_model(use_orig_params=use_orig_params, cpu_offload=CPUOffload(True)))
        model.to(device())
        half = finding(model, "half-moved")
        equal((half.severity, half.entry), ("bad", "fsdp1-moved-with-policy-offload"))
        model = trained(fsdp1_model(use_orig_params=use_orig_params))
        model.to("cpu")
        equal(finding(model, "half-moved").entry, "fsdp1-manual-offload-then-state-dict")


@check
def optimizer_state_apart_from_its_parameter_is_bad_where_an_optimizer_is_given() -> None:
    for name, build in HEALTHY.items():
        model = build()
        optimizer = train(model)
        other = torch.device("cpu") if "policy" not in name else device()
        for entries in optimizer.state.values():
            entries |= {key: value.to(other) for key, value in entries.items()}
        apart = finding(model, "optimizer-elsewhere", optimizer)
        equal((name, apart.severity, apart.entry), (name, "bad", "optim-on-wrong-device-after-offload"))
        assert "(exp_avg, exp_avg_sq)" in apart.sentence, apart.sentence
        equal((name, kinds(examine(model))), (name, []))


@check
def a_nonblocking_copy_is_a_hazard_while_its_stream_works_and_a_note_after() -> None:
    model = trained(fsdp2_model())
    torch.emulated.synchronize()
    offloading.offload(model, non_blocking=True)
    assert torch.emulated.copies_in_flight() > 0
    copy = finding(model, "copy-outstanding")
    equal((copy.severity, copy.entry), ("hazard", "non-blocking-d2h-read-too-early"))
    assert "has work left" in copy.sentence, copy.sentence
    torch.emulated.synchronize()
    equal(finding(model, "copy-outstanding").severity, "note")


@check
def a_copy_on_another_stream_is_neither_seen_nor_waited_for() -> None:
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


@check
def a_nonblocking_offload_of_the_optimizer_is_seen_too() -> None:
    model = fsdp2_model()
    optimizer = train(model)
    torch.emulated.synchronize()
    for entries in optimizer.state.values():
        entries |= {key: value.to("cpu", non_blocking=True) for key, value in entries.items()}
    equal(finding(model, "copy-outstanding", optimizer).severity, "hazard")
    torch.emulated.synchronize()


@check
def a_buffer_or_a_model_on_another_device_of_the_kind_is_bad() -> None:
    """The usual mistake: every rank's buffers on device 0."""
    other = torch.device("emulated", 1 - dist.get_rank())
    model = trained(fsdp2_model())
    model.scale = model.scale.to(other)
    assert "buffers-left-behind" in {finding.kind for finding in examine(model).bad}
    model = trained(fsdp2_model()).to(other)
    assert "elsewhere" in {finding.kind for finding in examine(model).bad}


@check
def uneven_shards_and_a_nonblocking_offload_are_a_hazard_together_only() -> None:
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


@check
def shards_on_the_cpu_in_a_group_without_a_backend_for_it_are_a_hazard() -> None:
    # Another name than the other mesh's: torch takes one mesh for an equal one, and with it its group.
    own = DeviceMesh.from_group(dist.new_group(backend="emulated"), "emulated", mesh_dim_names=("alone",))
    offloaded = trained(fsdp2_model(over=own))
    equal(kinds(examine(offloaded)), [])
    offloading.offload(offloaded, non_blocking=False)
    for model in (offloaded, trained(fsdp2_model(over=own, offload_policy=PINNED))):
        alone = finding(model, "no-backend-for-cpu")
        equal((alone.severity, alone.entry), ("hazard", "full-tensor-cpu-shard-nccl-only"))


# How it looks


@check
def one_rank_alone_may_call_it_and_a_guard_raises() -> None:
    model = trained(fsdp2_model(offload_policy=PINNED))
    optimizer = train(model)
    model.to(device())
    if dist.get_rank() == 1:
        with pytest.raises(ModelIsBad, match=r"^half-moved: Reporting emulated:1") as raised:
            examine(model, optimizer, raise_on_bad=True)
        equal(kinds(raised.value.examination, "bad"), ["half-moved"])


@check
def nothing_is_changed() -> None:
    states = [build() for build in HEALTHY.values()] + [trained(build()) for build in HEALTHY.values()]
    states.append(trained(fsdp2_model(offload_policy=PINNED)).to(device()))
    for model in states:
        before = identity(model)
        allocated = torch.emulated.memory_allocated()
        with torch.inference_mode():
            examine(model)
        str(examine(model))
        equal((identity(model), torch.emulated.memory_allocated()), (before, allocated))


def identity(model: nn.Module) -> list[tuple[Any, ...]]:
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [(name, shown, fsdp2.local_tensor(shown)) for name, shown in own]
    return [
        (
            name,
            id(shown),
            shown.device,
            shown._version,
            shown.requires_grad,
            local.device,
            local.data_ptr(),
            local._version,
        )
        for name, shown, local in tensors
    ]


@check
def it_prints_a_short_table_with_the_findings() -> None:
    model = trained(fsdp2_model(offload_policy=PINNED)).to(device())
    text = str(examine(model))
    for words in (
        "bad, half-moved:",
        "[fsdp2-pinned-policy-half-moved]",
        "fsdp2 on emulated:",
        "5 parameters and 1 tied",
    ):
        assert words in text, text
    assert len(text.splitlines()) < 15, text


# The program


def error_of(name: str) -> str:
    try:
        CHECKS[name]()
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        return f"{type(error).__name__}: {error} (lines {lines})".replace("\n", " ")[:1500]
    return ""


def run(name: str, control: dist.ProcessGroup) -> bool:
    """Whether it held on every rank."""
    begin = time.monotonic()
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error_of(name), control)
    failed = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
    if dist.get_rank() == 0:
        line = f"FAILED {name}: {failed}" if failed else f"ok {name} ({time.monotonic() - begin:.1f} s)"
        os.write(sys.stdout.fileno(), f"{line}\n".encode())
    return not failed


def main() -> None:
    import fsdp_doctor.emulated  # noqa: F401, which registers the device

    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("cpu:gloo,emulated:emulated", timeout=timeout)
    torch.get_device_module("emulated").set_device(dist.get_rank())
    control = dist.new_group(backend="gloo", timeout=timeout)
    held = [run(name, control) for name in CHECKS if not sys.argv[1:] or name in sys.argv[1:]]
    os._exit(not all(held))


if __name__ == "__main__":
    main()
