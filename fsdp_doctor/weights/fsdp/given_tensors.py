"""Tensors that a caller gives instead of the model's own, such as an average of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.forms import describe_form
from fsdp_doctor.weights.fsdp.reader import ModelContents, ModelTensor

GivenTensors: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by names of the model: each a DTensor of the shape of the model's tensor, or a plain tensor that is whole."""


def put_in_place(contents: ModelContents, tensors: GivenTensors | None) -> ModelContents:
    """Returns the contents with the given tensors in place of the model's own; unchanged if ``tensors`` is None.

    The result has only the given tensors, in the model's order, each with all of its names in the model. Any rank may
    call it alone. Raises TypeError unless ``tensors`` is a mapping of names to tensors. Raises ValueError for a name
    that no parameter or persistent buffer has, for a parameter in an FSDP1 unit, for two different tensors for one tied
    tensor, and for a shape that differs from the model's.
    """
    if tensors is None:
        return contents
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors, not {type(tensors).__name__}")
    known = {name: tensor for tensor in contents.list_tensors() for name in tensor.names}
    in_units = {name for unit in contents.fsdp1_units for names in unit.names for name in names}
    given: dict[int, ModelTensor] = {}
    strangers: list[str] = []
    for wrapped_name, tensor in tensors.items():
        if not isinstance(wrapped_name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors must map names to tensors, but has a {type(tensor).__name__} as {wrapped_name!r}")
        name = strip_wrappers(wrapped_name)
        if name in in_units:
            raise ValueError(
                f"tensors: {name} is in an FSDP1 unit, whose shards have no layout of their own: copy the values "
                "into the model for the time of this call, or shard the model with fully_shard"
            )
        if name not in known:
            strangers.append(wrapped_name)
            continue
        own = known[name]
        _check_shape(name, tensor, own)
        new = ModelTensor(own.names, tensor, tensor, None, describe_form(private.read_local_tensor(tensor)))
        if not _is_one(given.setdefault(id(own), new).tensor, tensor):
            raise ValueError(
                f"tensors: {' and '.join(own.names)} are tied in the model, but two different tensors were given"
            )
    if strangers:
        raise ValueError(f"tensors: no parameter and no persistent buffer is called {join_some(strangers)}")

    def choose(own: tuple[ModelTensor, ...]) -> tuple[ModelTensor, ...]:
        return tuple(given[id(tensor)] for tensor in own if id(tensor) in given)

    return replace(
        contents,
        fsdp1_units=(),
        fsdp2_units=(),
        parameters=choose(contents.parameters),
        buffers=choose(contents.buffers),
        transient_buffers=(),
        stray_pieces=(),
    )


def _check_shape(name: str, tensor: torch.Tensor, own: ModelTensor) -> None:
    shape = own.tensor.shape
    if tensor.shape == shape:
        return
    is_shard = not isinstance(tensor, DTensor) and tensor.shape == private.read_local_tensor(own.tensor).shape
    what = (
        (
            f"is a plain tensor with this rank's shard of {list(shape)}: pass DTensor.from_local of the shard, "
            "with the mesh, placements, shape and strides of the model's tensor"
        )
        if is_shard
        else f"has the shape {list(tensor.shape)}, but {list(shape)} in the model"
    )
    raise ValueError(f"tensors: {name} {what}")


def _is_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same memory and dtype.

    A state dict has a separate object for each name of a tied tensor.
    """
    if one is other:
        return True
    first, second = private.read_local_tensor(one), private.read_local_tensor(other)
    return first.device == second.device and first.data_ptr() == second.data_ptr() and one.dtype == other.dtype
