"""The engines' own senders and receivers: what each has after a sync, and what our sums of that sync say."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from program import read_report, run
from support import engine_modules
from support.emulation import needs_emulation
from support.extraction import assert_same, fsdp2, new_net, on_the_device, tensors_of
from support.ranks import this_rank
from torch import nn

from fsdp_doctor import (
    FingerprintError,
    Fingerprints,
    FingerprintSums,
    TensorPart,
    compare_fingerprints,
    engines,
    fingerprint_tensors,
)

_TRAINED = {"gate": torch.full((2, 2), 1.0), "up": torch.full((2, 2), 2.0)}


class _Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), -1.0))

        # vLLM goes by the names of the parameters.
        def load(param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int) -> None:
            param.data[2 * shard_id : 2 * shard_id + 2].copy_(loaded_weight)

        self.weight.weight_loader = load  # type: ignore[attr-defined]


def _reload(layerwise: Any, sent: Sequence[str]) -> tuple[torch.Tensor, FingerprintSums]:
    """Returns what vLLM's reload makes of halves that are sent, and the sums of what arrived."""
    model = nn.Module()
    model.fused = _Fused()
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    sums = FingerprintSums()
    for name in sent:
        sums.add_bucket([(name, _TRAINED[name])])
        weight: Any = model.fused.weight
        weight.weight_loader(weight, _TRAINED[name].clone(), list(_TRAINED).index(name))
    layerwise.finalize_layerwise_reload(model, None)
    return model.fused.weight.detach(), sums


def _sum_halves(weight: torch.Tensor) -> Fingerprints:
    halves = zip(_TRAINED, weight.split(2), strict=True)
    return fingerprint_tensors([(name, TensorPart(half, (2, 2))) for name, half in halves])


@pytest.fixture
def _nan_where_uninitialized() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_where_uninitialized")
def test_sums_find_a_half_that_vllms_reload_counts_twice_or_misses() -> None:
    with engine_modules.vllm_reload() as layerwise:
        weight, sums = _reload(layerwise, ("gate", "up"))
        trained = fingerprint_tensors(_TRAINED)
        assert list(compare_fingerprints(trained, sums.fingerprints())) == []
        assert list(compare_fingerprints(trained, _sum_halves(weight))) == []

        # Neither raises, though half of the weight was never sent.
        weight, sums = _reload(layerwise, ("gate", "gate"))
        assert weight[2:].isnan().all()
        with pytest.raises(FingerprintError, match="gate"):
            sums.fingerprints()
        weight, sums = _reload(layerwise, ("gate",))
        assert weight[2:].isnan().all()
        assert [difference.name for difference in compare_fingerprints(trained, sums.fingerprints())] == ["up"]


@on_the_device
def test_verls_own_bucketed_receiver_has_the_model_that_its_sender_was_given() -> None:
    net = new_net(empty=False)
    expected = tensors_of(net)
    with engine_modules.verl_buckets() as verl:
        weights, _ = engines.verl_weights(fsdp2(net))
        if this_rank() != 0:
            assert_same(dict(weights), expected)
            return
        address = f"ipc:///tmp/fsdp-doctor-{os.getpid()}.sock"
        received: dict[str, torch.Tensor] = {}

        def keep(tensors: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            del is_last
            received.update((name, tensor.clone()) for name, tensor in tensors)

        receiver = verl.BucketedWeightReceiver(address, torch.device("cpu"), use_shm=True)
        sender = verl.BucketedWeightSender(address, bucket_size_mb=64, use_shm=True)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(receiver.receive_weights, keep)
            asyncio.run(sender.async_send_weights((name, tensor.cpu()) for name, tensor in weights))
            done.result(60)
        assert_same(received, expected, torch.device("cpu"))


def _probe_with(directory: pathlib.Path, packages: pathlib.Path, *cases: str) -> dict[str, Any]:
    needs_emulation()
    report = directory / "report.json"
    words = [word for case in cases for word in ("--case", f"fsdp2/none/unstaged/{case}")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(packages)])}
    command = (sys.executable, "-m", "fsdp_doctor", "probe", "--device", "emulated", "--json", str(report), *words)
    run(*command, env=env)
    results = read_report(report).results
    return {result.id.removeprefix("fsdp2/none/unstaged/"): result.verdict for result in results}


@pytest.mark.processes
def test_a_packed_consumer_sends_by_vllms_own_code_where_it_is_installed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "vllm" / "distributed" / "weight_transfer" / "packed_tensor.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        textwrap.dedent("""
            import torch
            def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func, buffer_size_bytes):
                for item in iterator:
                    with torch.cuda.stream(torch.cuda.current_stream()):
                        group.broadcast(post_iter_func(item).reshape(-1).view(torch.uint8).flip(0), src=src)
                    torch.cuda.synchronize()
        """)
    )
    (verdict,) = _probe_with(tmp_path, tmp_path, "packed/full_tensors").values()
    assert (verdict.kind, verdict.ranks) == ("wrong", (0,))


@pytest.mark.processes
def test_vllms_packed_sender_is_right_but_does_not_wait_for_a_step(tmp_path: pathlib.Path) -> None:
    if not (packages := os.environ.get("FSDP_DOCTOR_ENGINE_FILES")):
        pytest.skip("FSDP_DOCTOR_ENGINE_FILES does not name vLLM's files")
    cases = ("packed/full_tensors", "packed/parameters.full_tensor", "step-in-flight/parameters.full_tensor")
    verdicts = _probe_with(tmp_path, pathlib.Path(packages), *cases)
    assert [verdicts[case].kind for case in cases] == ["ok", "ok", "race"]
