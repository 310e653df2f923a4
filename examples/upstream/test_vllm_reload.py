"""vLLM: a layer of the reload-correctness harness (RFC 48312): a reload serves what the trainer has"""

import pytest
import torch

from fsdp_doctor import FingerprintSums, compare_fingerprints, engines, fingerprint_tensors

reload = pytest.importorskip("vllm.model_executor.model_loader.reload", exc_type=ImportError)
_HALVES = {"gate_proj": torch.full((2, 4), 1.0), "up_proj": torch.full((2, 4), 2.0)}


def _load_half(param, loaded_weight, shard_id):  # as MergedColumnParallelLinear loads what it fuses
    param.data.narrow(0, 2 * shard_id, 2).copy_(loaded_weight)


@pytest.mark.parametrize("sent", ["gate_proj up_proj", "up_proj gate_proj", "gate_proj", "gate_proj gate_proj"])
def test_a_reload_serves_what_the_trainer_has(sent):
    model, arrived, trained = torch.nn.Linear(4, 4, bias=False), FingerprintSums(), fingerprint_tensors(_HALVES)
    model.weight.weight_loader = _load_half
    reload.record_metadata_for_reloading(model)
    reload.initialize_layerwise_reload(model)
    for bucket in engines.packed_buckets(((name, _HALVES[name]) for name in sent.split()), bucket_bytes=32):
        received = list(engines.read_bucket(bucket.buffer, bucket.index))
        arrived.add_bucket(received)
        for name, half in received:
            model.weight.weight_loader(model.weight, half, list(_HALVES).index(name))
    reload.finalize_layerwise_reload(model, None)
    said = [str(each) for each in compare_fingerprints(trained, arrived.fingerprints())]
    held = fingerprint_tensors(zip(_HALVES, model.weight.split(2), strict=True))
    assert not compare_fingerprints(trained, held), f"served all the same, though of what arrived the sums say: {said}"
