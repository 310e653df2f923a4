"""What verl's training engines return: ``get_per_tensor_param`` and ``get_per_tensor_param_shard``.

Read in verl 0.9.1 (``workers/engine/fsdp/transformer_impl.py``, ``workers/engine/spec.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from fsdp_doctor.engines.for_vllm import ExtractionOptions
from fsdp_doctor.extract import LocalShard, full_tensors, local_shards


def verl_weights(
    model: nn.Module, **options: Unpack[ExtractionOptions]
) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
    """In place of ``get_per_tensor_param``: the generator for ``send_weights``, and no configuration of an adapter.

    Adapters are merged. Arguments, errors and which ranks must call as :func:`fsdp_doctor.full_tensors`.
    """
    return full_tensors(model, **options), None


def verl_shards(
    model: nn.Module, **options: Unpack[ExtractionOptions]
) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], None]:
    """In place of ``get_per_tensor_param_shard``: (name, this rank's shard, 1-D, on the device, verl's ShardSpec).

    FSDP1's flat shards too, which verl has as DTensors only. verl must be installed. Arguments, errors and
    which ranks must call as :func:`fsdp_doctor.local_shards`.
    """
    spec = importlib.import_module("verl.workers.engine.spec").ShardSpec
    return (
        (shard.name, shard.tensor.reshape(-1), _spec(spec, shard)) for shard in local_shards(model, **options)
    ), None


def _spec(spec: Any, shard: LocalShard) -> Any:
    place = shard.place
    if place.mesh is not None:
        return spec(full_shape=tuple(shard.shape), mesh=place.mesh, placements=place.placements)
    if place.group is None:
        return spec(full_shape=tuple(shard.shape))
    return spec(full_shape=tuple(shard.shape), place=place.offset, gather_group=place.group)
