"""vLLM's ``WeightSource`` over a model: its trainers' ``send_weights`` read from it.

Read in vLLM 0.33.0 (``distributed/weight_transfer/base.py``). vLLM's own ``ModuleSource`` reads ``named_parameters()``
where the shards lie, in the dtype of the masters: no offload, no FSDP1, no merged adapters, no buffers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterator
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from typing_extensions import Unpack

from fsdp_doctor.extract import full_tensors, local_shards, weights_info
from fsdp_doctor.extract.full import BUCKET_BYTES
from fsdp_doctor.extract.local import request_of
from fsdp_doctor.extract.lora import Lora
from fsdp_doctor.extract.own_shards import ShardPlace, own_shards


class ExtractionOptions(TypedDict, total=False):
    """The options of :func:`fsdp_doctor.full_tensors` that an engine's interface passes on."""

    dtype: torch.dtype | None
    keep_dtype: Collection[str]
    bucket_bytes: int
    lora: Lora


def vllm_weight_source(model: nn.Module, **options: Unpack[ExtractionOptions]) -> Any:
    """A ``vllm.distributed.weight_transfer.base.WeightSource``: ``metadata``, ``iter_full``, and ``iter_local``.

    ``iter_local`` exists where vLLM can describe every shard: cut along dims as torch.chunk does. So not
    for FSDP1's flat parameters, nor for FSDP over tensor parallelism of the same dim. The ranks of the
    default process group must be vLLM's trainer ranks. vLLM must be installed. ``metadata`` is read when it is first
    asked for, so shard the model first; any rank may read it alone.

    Arguments, errors and which ranks must iterate as :func:`fsdp_doctor.full_tensors` and ``local_shards``.
    """
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    places = _places(model, options.get("lora", "merged"))

    class FullSource(base.WeightSource):  # type: ignore[misc,name-defined]
        @functools.cached_property
        def metadata(self) -> list[Any]:
            asked = {key: value for key, value in options.items() if key != "bucket_bytes"}
            return [
                base.ParamMeta(name, info.dtype, tuple(info.shape), **_layout(base, places.get(name)))
                for name, info in weights_info(model, **asked).items()  # type: ignore[arg-type]
            ]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return full_tensors(model, **options)

    class ShardedSource(FullSource):
        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((shard.name, shard.tensor) for shard in local_shards(model, **options))

    return ShardedSource() if all(map(_can_be_described, places.values())) else FullSource()


def _places(model: nn.Module, lora: Lora) -> dict[str, ShardPlace]:
    """The places of this rank's shards, by the name in the model."""
    request = request_of(model, None, (), BUCKET_BYTES, lora)
    shards = own_shards(request.sources, request.shards)
    return {name: shard.place for shard in shards for name in shard.spec.names}


def _can_be_described(place: ShardPlace) -> bool:
    if place.mesh is None or place.placements is None:
        return place.group is None
    return all(type(placement) in (Shard, Replicate) for placement in place.placements)


def _layout(base: Any, place: ShardPlace | None) -> dict[str, Any]:
    """The owners and placements of a parameter, in vLLM's terms; empty where it is whole on every rank."""
    if place is None or place.mesh is None or place.placements is None or not _can_be_described(place):
        return {}
    return {
        "owners": tuple(place.mesh.mesh.flatten().tolist()),
        "mesh_shape": tuple(place.mesh.mesh.shape),
        "placements": tuple(
            base.Shard(placement.dim) if isinstance(placement, Shard) else base.Replicate()
            for placement in place.placements
        ),
    }
