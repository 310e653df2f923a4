"""The one reader: every tensor once, with all of its names, in whatever state the model is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_doctor.weights.fsdp import private, reader


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(hidden) * self.scale))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_tensor_comes_once_with_all_of_its_names() -> None:
    contents = reader.read(Net())
    assert [tensor.names for tensor in contents.parameters] == [
        ("embed.weight", "head.weight"),
        ("layer.weight",),
        ("layer.bias",),
    ]
    assert [tensor.names for tensor in contents.buffers] == [("scale",)]
    assert [tensor.names for tensor in contents.transient_buffers] == [("scratch",)]
    assert [tensor.names for tensor in contents.list_tensors()] == [
        t.names for t in (*contents.parameters, *contents.buffers)
    ]
    assert (contents.fsdp1_units, contents.fsdp2_units) == ((), ())


def test_names_are_those_of_the_model_before_it_was_wrapped() -> None:
    net = Net()
    net.layer = checkpoint_wrapper(net.layer)
    names = [tensor.names for tensor in reader.read(net).parameters]
    assert names == [tensor.names for tensor in reader.read(Net()).parameters]


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_that_fsdp2_shows_unsharded_is_read_as_its_shard() -> None:
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(net, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    sharded = {tensor.names: tensor.tensor for tensor in reader.read(model).parameters}
    model.unshard()
    for tensor in reader.read(model).parameters:
        assert tensor.tensor is sharded[tensor.names]
        assert isinstance(tensor.tensor, DTensor)
        assert tensor.shown is net.get_parameter(tensor.names[0])
        assert tensor.shown.dtype == torch.bfloat16
    model.reshard()
    assert all(tensor.shown is tensor.tensor for tensor in reader.read(model).parameters)


@pytest.mark.usefixtures("one_rank")
def test_each_tensor_knows_the_innermost_fsdp2_module_around_it() -> None:
    net = Net()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net.layer, mesh=mesh)
    model = fully_shard(net, mesh=mesh)
    contents = reader.read(model)
    outer, inner = contents.fsdp2_units
    assert [tensor.unit for tensor in contents.parameters] == [outer, inner, inner]
    assert contents.parameters[0].unit is outer
    assert contents.parameters[1].unit is inner
    assert not inner.is_initialized
    model(torch.ones(2, 4))
    assert all(unit.is_initialized for unit in reader.read(model).fsdp2_units)


@pytest.mark.usefixtures("one_rank")
def test_a_local_tensor_is_the_memory_that_the_dtensor_wraps() -> None:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
    for tensor in reader.read(model).parameters:
        with torch.no_grad():
            public = tensor.tensor.to_local()  # type: ignore[attr-defined]
        assert private.read_local_tensor(tensor.tensor).data_ptr() == public.data_ptr()
    plain = torch.ones(2)
    assert private.read_local_tensor(plain) is plain
