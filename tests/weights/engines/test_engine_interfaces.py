"""Tests that what an engine's own receiving code makes of what we give it is the model before it was sharded."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from support import engine_modules
from support.engine_modules import Origin
from support.extraction import (
    EVEN,
    INTEGERS,
    all_trainable,
    assert_same,
    cast_of,
    everywhere,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    take_some,
    tensors_of,
)
from support.ranks import Setting, accelerator, of_all_ranks, on_ranks, this_device, this_rank, world_size
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_doctor import RankLeft, engines, full_tensors

BF16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}


@everywhere
def test_a_packed_bucket_is_read_as_it_was_packed() -> None:
    net = new_net()
    expected = cast_of(tensors_of(net), torch.bfloat16)
    model = fsdp2(net)
    for bucket_bytes in (1, 4096, 1 << 20, 1 << 30):
        found: dict[str, torch.Tensor] = {}
        for bucket in engines.packed_buckets(full_tensors(model, **BF16), bucket_bytes):
            assert bucket.buffer.dtype == torch.uint8
            assert len(bucket.buffer) <= bucket_bytes or len(bucket.index) == 1
            index = [engines.PackedTensor(**one) for one in json.loads(json.dumps([vars(o) for o in bucket.index]))]
            found |= dict(engines.read_bucket(bucket.buffer, index))
        assert_same(found, expected)


def test_an_index_that_does_not_fit_its_bucket_is_refused() -> None:
    (bucket,) = engines.packed_buckets([("a", torch.ones(3)), ("b", torch.ones(5, dtype=torch.int8))])
    for buffer in (bucket.buffer[:-1], bucket.buffer.view(1, -1), bucket.buffer.view(torch.int8)):
        with pytest.raises(ValueError, match="bucket"):
            list(engines.read_bucket(buffer, bucket.index))
    wrong = engines.PackedTensor("a", "float64", (3,), 0, 12)
    with pytest.raises(ValueError, match="does not fit the tensor"):
        list(engines.read_bucket(bucket.buffer, [wrong]))
    with pytest.raises(ValueError, match="must be positive"):
        list(engines.packed_buckets([], 0))


def _sglang_reads_flattened_buckets_of_several_dtypes(origin: Origin) -> None:
    net = all_trainable(new_net(empty=False))
    expected = cast_of(tensors_of(net), torch.bfloat16)
    models = (fsdp2(new_net(empty=False), offload_policy=CPUOffloadPolicy()), fsdp1(net))

    with engine_modules.sglang(origin) as sglang:
        for model in models:
            found: dict[str, torch.Tensor] = {}
            # The emulated device's memory cannot be shared with another process.
            tensors = ((name, tensor.cpu()) for name, tensor in full_tensors(model, **BF16))
            for bucket in engines.sglang_buckets(tensors, 4096):
                payloads = bucket.serialized(tp_size=2)
                assert len(payloads) == 2
                for payload in payloads:
                    found |= {name: tensor.clone() for name, tensor in sglang.load(payload)}
            assert_same(found, expected, torch.device("cpu"))


@on_the_device
def test_sglang_reads_flattened_buckets_of_several_dtypes() -> None:
    _sglang_reads_flattened_buckets_of_several_dtypes("stand-in")


@on_the_device
def test_sglang_reads_flattened_buckets_of_several_dtypes_by_its_own_code() -> None:
    _sglang_reads_flattened_buckets_of_several_dtypes("engine")


def _vllm_reads_full_tensors_by_its_metadata(origin: Origin) -> None:
    net = new_net()
    expected = cast_of(tensors_of(net), torch.bfloat16)
    model = fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=False))

    with engine_modules.vllm(origin) as vllm:
        source = engines.vllm_weight_source(model, **BF16)
        assert isinstance(source, vllm.base.WeightSource)
        assert source.implements_iter_full()
        assert source.implements_iter_local()
        assert len(set(of_all_ranks(repr(source.metadata)))) == 1
        assert [(one.name, one.dtype, one.shape) for one in source.metadata] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source.iter_full()
        ]
        assert_same(_through_packing(vllm, source), expected)


@everywhere
def test_vllm_reads_full_tensors_by_its_metadata() -> None:
    _vllm_reads_full_tensors_by_its_metadata("stand-in")


@everywhere
def test_vllm_reads_full_tensors_by_its_metadata_by_its_own_code() -> None:
    _vllm_reads_full_tensors_by_its_metadata("engine")


@on_the_device
def test_vllms_source_waits_for_a_training_step_on_another_stream() -> None:
    model = fsdp2(new_net())
    step, sends = accelerator().Stream(this_device()), accelerator().Stream(this_device())
    with engine_modules.vllm("stand-in"):
        source = engines.vllm_weight_source(model)
        for pull in (source.iter_full, source.iter_local):
            before = {name: tensor.clone() for name, tensor in pull()}
            accelerator().synchronize()
            with accelerator().race_detection():
                with accelerator().stream(step), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().add_(1.0)
                with accelerator().stream(sends):
                    found = {name: tensor.clone() for name, tensor in pull()}
                accelerator().synchronize()
            buffers = {name for name, _ in model.named_buffers()}
            for name, tensor in before.items():
                assert torch.equal(found[name], tensor if name in buffers else tensor + 1.0), name


@on_ranks(Setting("emulated", 2), Setting("cpu", 4))
def test_closing_a_source_during_error_handling_frees_the_other_ranks() -> None:
    model = fsdp2(new_net())
    for engine in ("vLLM", "verl"):
        with engine_modules.vllm("stand-in"):
            opened = (
                engines.vllm_weight_source(model, bucket_bytes=1024)
                if engine == "vLLM"
                else engines.verl_weights(model, bucket_bytes=1024)[0]
            )
        with pytest.raises(ZeroDivisionError if this_rank() == 0 else RankLeft) as caught, opened:
            take_some(opened.iter_full() if engine == "vLLM" else opened, 2 if this_rank() == 0 else None)
        dist.barrier()
        assert caught.tb is not None


def _through_packing(vllm: object, source: object) -> dict[str, torch.Tensor]:
    """Packs as vLLM's senders and unpacks as its workers do; a dtype by itself, for alignment."""
    packing = vllm.packed_tensor  # type: ignore[attr-defined]
    if packing is None:
        return dict(source.iter_full())  # type: ignore[attr-defined]
    found: dict[str, torch.Tensor] = {}
    for kind in (torch.bfloat16, torch.int64):
        chosen = ((name, one) for name, one in source.iter_full() if one.dtype == kind and one.numel())  # type: ignore[attr-defined]
        while (chunk := packing.pack_tensors(chosen, lambda item: item[1], 1 << 21)) is not None:
            packed = chunk.packed_tensor
            found |= packing.unpack_tensor(packed, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
    return found | {name: one for name, one in source.iter_full() if not one.numel()}  # type: ignore[attr-defined]


def _vllm_reads_shards_by_their_placements(origin: Origin) -> None:
    expected = tensors_of(new_net(**EVEN))
    meshes = [mesh_over(), mesh_over(2, 2)] if world_size() == 4 else [mesh_over()]

    with engine_modules.vllm(origin) as vllm:
        for mesh in meshes:
            source = engines.vllm_weight_source(fsdp2(new_net(**EVEN), mesh))
            joined = {one.name: torch.zeros(one.shape, dtype=one.dtype) for one in source.metadata}
            local = {name: tensor.cpu() for name, tensor in source.iter_local()}
            assert list(local) == [one.name for one in source.metadata]
            if vllm.m2n_common is not None:
                _assert_shapes_of_m2n(vllm.m2n_common, source, local)
            for shards in of_all_ranks((this_rank(), local)):
                _put(joined, source, *shards)
            assert_same(joined, expected, torch.device("cpu"))


@on_ranks(Setting("emulated", 2), Setting("cpu", 4))
def test_vllm_reads_shards_by_their_placements() -> None:
    _vllm_reads_shards_by_their_placements("stand-in")


@on_ranks(Setting("emulated", 2), Setting("cpu", 4))
def test_vllm_reads_shards_by_their_placements_by_its_own_code() -> None:
    _vllm_reads_shards_by_their_placements("engine")


def _assert_shapes_of_m2n(m2n: object, source: object, local: dict[str, torch.Tensor]) -> None:
    """Asserts the shapes that vLLM's NCCL M2N expects where a tensor is divided evenly; others it refuses."""
    checked = 0
    for one in source.metadata:  # type: ignore[attr-defined]
        if one.shape and one.placements and one.shape[0] % world_size() == 0:
            meta = m2n.m2n_param_meta(one, world_size())  # type: ignore[attr-defined]
            assert m2n.expected_local_shape(meta) == tuple(local[one.name].shape)  # type: ignore[attr-defined]
            checked += 1
    assert checked


def _put(joined: dict[str, torch.Tensor], source: object, rank: int, local: dict[str, torch.Tensor]) -> None:
    """A rank's pieces, by owners, mesh shape and placements alone."""
    for one in source.metadata:  # type: ignore[attr-defined]
        view = joined[one.name]
        if one.owners is not None:
            place = torch.arange(len(one.owners)).view(one.mesh_shape)
            coordinate = (place == one.owners.index(rank)).nonzero()[0].tolist()
            for at, size, placement in zip(coordinate, one.mesh_shape, one.placements or (), strict=False):
                if hasattr(placement, "dim"):
                    chunks = view.chunk(size, placement.dim)
                    view = chunks[at] if at < len(chunks) else view.narrow(placement.dim, 0, 0)
        view.copy_(local[one.name])


def _vllm_is_offered_no_shards_that_it_cannot_be_told_of(origin: Origin) -> None:
    expected = tensors_of(new_net(empty=False))
    model = fsdp1(new_net(empty=False))

    with engine_modules.vllm(origin):
        source = engines.vllm_weight_source(model)
        assert source.implements_iter_full()
        assert not source.implements_iter_local()
        assert_same(dict(source.iter_full()), expected)


@on_the_device
def test_vllm_is_offered_no_shards_that_it_cannot_be_told_of() -> None:
    _vllm_is_offered_no_shards_that_it_cannot_be_told_of("stand-in")


@on_the_device
def test_vllms_own_code_is_offered_no_shards_that_it_cannot_describe() -> None:
    _vllm_is_offered_no_shards_that_it_cannot_be_told_of("engine")


def _verl_reads_full_tensors_and_shards_of_both_fsdps(origin: Origin) -> None:
    expected = tensors_of(new_net(empty=False))
    models = (fsdp2(new_net(empty=False)), fsdp1(new_net(empty=False)))

    with engine_modules.verl(origin) as verl:
        for model in models:
            weights, adapter_config = engines.verl_weights(model)
            assert adapter_config is None
            assert_same(dict(weights), expected)
            shards, _ = engines.verl_shards(model)
            own = {name: (spec, shard) for name, shard, spec in shards}
            assert sorted(own) == sorted(expected)
            assert all(shard.device == this_device() and shard.ndim == 1 for _, shard in own.values())
            if hasattr(verl, "translate_flat_indices"):
                _assert_places_of_verl(verl, own, expected)


@on_the_device
def test_verl_reads_full_tensors_and_shards_of_both_fsdps() -> None:
    _verl_reads_full_tensors_and_shards_of_both_fsdps("stand-in")


@on_the_device
def test_verls_own_code_reads_full_tensors_and_shards_of_both_fsdps() -> None:
    _verl_reads_full_tensors_and_shards_of_both_fsdps("engine")


def _assert_places_of_verl(verl: object, own: dict, expected: dict[str, torch.Tensor]) -> None:  # type: ignore[type-arg]
    """Each local element at the place that verl's delta engine gives it."""
    for name, (spec, shard) in own.items():
        place = spec.place if spec.place is not None else verl.derive_dtensor_placement(spec)[0]  # type: ignore[attr-defined]
        index = verl.translate_flat_indices(torch.arange(shard.numel()), place)  # type: ignore[attr-defined]
        assert torch.equal(expected[name].reshape(-1)[index], shard.cpu()), name
