"""Weights of a sharded model through the interfaces of vLLM, SGLang and verl.

The interfaces were read in vLLM 0.33.0 (``distributed/weight_transfer/base.py``), SGLang 0.5.23
(``weight_sync/tensor_bucket.py``, ``utils/common.py``, ``weight_updater.py``) and verl 0.9.1
(``workers/engine/fsdp/transformer_impl.py``, ``workers/engine/spec.py``).
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from typing_extensions import Self, Unpack

from fsdp_doctor.weights.engines.packed_bucket import PackedBucket, packed_buckets
from fsdp_doctor.weights.extract import (
    ClosingIterator,
    LocalShard,
    ShardPlace,
    full_tensors,
    local_shards,
    weights_info,
)
from fsdp_doctor.weights.extract.local import LoadedShard, divide_shard, request_shards
from fsdp_doctor.weights.extract.lora import Lora
from fsdp_doctor.weights.extract.plan import BUCKET_BYTES, Arguments
from fsdp_doctor.weights.fsdp.expert_groups import Experts
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors
from fsdp_doctor.weights.names import Names, NamesError
from fsdp_doctor.weights.transport.shard_places import read_own_shards
from fsdp_doctor.weights.transport.streams import wait_for_device

_T = TypeVar("_T")


class ShardOptions(TypedDict, total=False):
    """Options that the engines' interfaces pass to :func:`fsdp_doctor.local_shards`.

    names: the names of the tensors. By default ``auto``: the Hub's names, which engines load, if transformers knows
    them for the model.
    """

    dtype: torch.dtype | None
    keep_dtype: Collection[str]
    bucket_bytes: int
    lora: Lora
    names: Names
    experts: Experts | None
    tensors: GivenTensors | None


class ExtractionOptions(ShardOptions, total=False):
    """Options that the engines' interfaces pass to :func:`fsdp_doctor.full_tensors`."""

    in_step: bool


# vLLM. Its own ``ModuleSource`` reads ``named_parameters()`` on the device and in the dtype of the shards: it supports
# no offload, no FSDP1, no merged adapters and no buffers.


def vllm_weight_source(model: nn.Module, **options: Unpack[ExtractionOptions]) -> Any:
    """Returns a ``vllm.distributed.weight_transfer.base.WeightSource``, which vLLM's trainers pass to ``send_weights``.

    The source has ``metadata`` and ``iter_full``. It has ``iter_local``, too, if vLLM can describe every shard, which
    means that tensors are cut along dims as torch.chunk cuts them. It cannot describe FSDP1's flat parameters, nor FSDP
    over tensor parallelism of the same dim. The ranks of the default process group must be vLLM's trainer ranks. vLLM
    must be installed. ``metadata`` is computed when it is first read, so shard the model before that; any rank may read
    ``metadata`` alone.

    Both iterators first wait until the device has done all work that was launched on it, because vLLM's packed sender
    reads the tensors on its own streams, which do not wait for a training step. ``close``, or leaving a ``with`` block
    of the source, closes the iterators that are not exhausted, so that no rank waits for a rank whose sender raised.

    Arguments, errors and the ranks that must iterate are those of :func:`fsdp_doctor.full_tensors` and
    ``local_shards``.
    """
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    options.setdefault("names", "auto")
    arguments = Arguments.check(
        lora=options.get("lora", "merged"), names=options["names"], experts=options.get("experts")
    )
    request = request_shards(model, arguments, options.get("tensors"))
    places = {
        name: part.place
        for own in read_own_shards(request.sources, request.shards)
        for part in divide_shard(request.plan.names, LoadedShard(own.spec, own.local, own.place, is_copy=False))
        for name in part.spec.names
    }
    shard_options: ShardOptions = {key: value for key, value in options.items() if key != "in_step"}  # type: ignore[assignment]

    class FullSource(base.WeightSource):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self._begun: weakref.WeakSet[ClosingIterator[Any]] = weakref.WeakSet()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *raised: object) -> None:
            self.close()

        def close(self) -> None:
            for tensors in list(self._begun):
                tensors.close()

        def _begin(self, tensors: ClosingIterator[_T]) -> ClosingIterator[_T]:
            self._begun.add(tensors)
            wait_for_device(request.device)
            return tensors

        @functools.cached_property
        def metadata(self) -> list[Any]:
            asked = {key: value for key, value in options.items() if key not in ("bucket_bytes", "in_step")}
            return [
                base.ParamMeta(name, info.dtype, tuple(info.shape), **_describe_layout(base, places.get(name)))
                for name, info in weights_info(model, **asked).items()  # type: ignore[arg-type]
            ]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self._begin(full_tensors(model, **options))

    class ShardedSource(FullSource):
        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            shards = self._begin(local_shards(model, **shard_options))
            return ((shard.name, shard.tensor) for shard in shards)

    return ShardedSource() if all(map(_can_be_described, places.values())) else FullSource()


def _can_be_described(place: ShardPlace) -> bool:
    if place.mesh is None or place.placements is None:
        return place.group is None and place.part is None
    return all(type(placement) in (Shard, Replicate) for placement in place.placements)


def _describe_layout(base: Any, place: ShardPlace | None) -> dict[str, Any]:
    """Describes a parameter's owners and placements in vLLM's terms; empty if the parameter is whole on every rank."""
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


# SGLang: ``update_weights_from_tensor(serialized_named_tensors, load_format="flattened_bucket")``.


@dataclass(frozen=True, eq=False)
class SglangBucket:
    """Bucket of tensors for SGLang.

    The engine reads the bucket's memory directly: keep the bucket until the engine has answered.
    """

    bucket: PackedBucket

    def serialized(self, tp_size: int = 1) -> list[bytes]:
        """Returns ``serialized_named_tensors``: one entry for each tensor-parallel rank, each serialized separately.

        An entry refers to the bucket's memory: by a CUDA IPC handle on a GPU, by a shared file on the CPU. SGLang must
        be installed.
        """
        flattened = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
        importlib.import_module("sglang.srt.utils.patch_torch").monkey_patch_torch_reductions()
        serializer: Any = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer
        # The metadata says where a tensor begins, so there can be gaps that align tensors of different dtypes.
        metadata = [
            flattened.FlattenedTensorMetadata(
                name=entry.name,
                shape=torch.Size(entry.shape),
                dtype=getattr(torch, entry.dtype),
                start_idx=entry.start,
                end_idx=entry.end,
                numel=entry.end - entry.start,
            )
            for entry in self.bucket.index
        ]
        content = {"flattened_tensor": self.bucket.buffer, "metadata": metadata}
        return [serializer.serialize(content) for _ in range(tp_size)]


def sglang_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[SglangBucket]:
    """Packs the tensors of ``full_tensors`` into buckets for SGLang.

    Every rank must iterate; only the ranks that send need to serialize. Device memory and errors are the same as for
    :func:`packed_buckets`.
    """
    for bucket in packed_buckets(tensors, bucket_bytes):
        yield SglangBucket(bucket)


# verl: what its training engines return.


def verl_weights(
    model: nn.Module, **options: Unpack[ExtractionOptions]
) -> tuple[ClosingIterator[tuple[str, torch.Tensor]], None]:
    """Replaces verl's ``get_per_tensor_param``: returns the iterator for ``send_weights``, and None instead of an
    adapter's configuration.

    Adapters are merged. Arguments, errors and the calling ranks are the same as for :func:`fsdp_doctor.full_tensors`.
    """
    options.setdefault("names", "auto")
    return full_tensors(model, **options), None


def verl_shards(
    model: nn.Module, **options: Unpack[ShardOptions]
) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], None]:
    """Replaces verl's ``get_per_tensor_param_shard``: returns an iterator of (name, this rank's shard, verl's
    ShardSpec), and None instead of an adapter's configuration.

    A shard is 1-D and on the device. FSDP1's flat shards are also yielded, whereas verl's own function knows only
    DTensors. verl must be installed. Arguments, errors and the calling ranks are the same as for
    :func:`fsdp_doctor.local_shards`.
    """
    options.setdefault("names", "auto")
    spec = importlib.import_module("verl.workers.engine.spec").ShardSpec
    return (
        (shard.name, shard.tensor.reshape(-1), _shard_spec(spec, shard)) for shard in local_shards(model, **options)
    ), None


def _shard_spec(spec: Any, shard: LocalShard) -> Any:
    place = shard.place
    if place.mesh is not None:
        return spec(full_shape=tuple(shard.shape), mesh=place.mesh, placements=place.placements)
    if place.part is not None:
        raise NamesError(
            f"{shard.name} is a part of a tensor that is sharded by columns, and verl has no way to express this: use "
            'verl_weights, or names="model"'
        )
    if place.group is None:
        return spec(full_shape=tuple(shard.shape))
    return spec(full_shape=tuple(shard.shape), place=place.offset, gather_group=place.group)
