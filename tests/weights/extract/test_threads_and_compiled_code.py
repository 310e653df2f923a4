"""Public functions called by another thread than the one that built the model, and in what torch.compile compiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.extraction import assert_same, sharded_net, sharded_net1
from support.loading import BUCKET_BYTES, on_first, other_tensors
from support.ranks import Setting, of_all_ranks, on_ranks, this_device, this_rank, together

import fsdp_doctor
from fsdp_doctor import full_tensors, load_full_tensors

on_the_device = on_ranks(Setting("emulated", 2))
everywhere = on_ranks(Setting("emulated", 2), Setting("cpu", 2))


def in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@on_the_device
def test_another_thread_gets_tensors_on_the_models_device() -> None:
    for model, expected in (sharded_net(), sharded_net1()):
        assert_same(in_new_thread(lambda: dict(full_tensors(model))), expected)  # noqa: B023
        names = in_new_thread(lambda: list(fsdp_doctor.local_shards(model)))  # noqa: B023
        assert {shard.tensor.device for shard in names} == {this_device()}


@on_the_device
def test_each_tensor_may_be_taken_by_another_thread() -> None:
    model, expected = sharded_net()
    tensors: Iterator[tuple[str, torch.Tensor]] = full_tensors(model, bucket_bytes=BUCKET_BYTES)
    found = {}
    while (pair := in_new_thread(lambda: next(tensors, None))) is not None:
        found[pair[0]] = pair[1]
    assert_same(found, expected)


@on_the_device
def test_another_thread_loads_saves_and_sums_as_the_first() -> None:
    for source in (dict, on_first):
        model, _ = sharded_net()
        in_new_thread(lambda: load_full_tensors(model, source(other_tensors())))  # noqa: B023
        assert_same(dict(full_tensors(model)), other_tensors())
    sums = in_new_thread(lambda: fsdp_doctor.fingerprint(model))
    assert not fsdp_doctor.compare_fingerprints(sums, fsdp_doctor.fingerprint(model))
    with tempfile.TemporaryDirectory() as own:
        directory = of_all_ranks(own)[0]
        in_new_thread(lambda: fsdp_doctor.save_full_tensors(model, f"{directory}/saved", names="model"))
        load_full_tensors(model, f"{directory}/saved")
        together()


@everywhere
def test_functions_run_as_they_are_in_compiled_code() -> None:
    model, expected = sharded_net()

    @torch.compile(backend="eager")
    def train(scale: torch.Tensor) -> dict[str, torch.Tensor]:
        report = load_full_tensors(model, expected if this_rank() == 0 else None)
        return {name: tensor for name, tensor in full_tensors(model=model) if report.loaded and bool(scale)}

    assert_same(train(torch.ones(())), expected)
    compiled = torch.compile(lambda: fsdp_doctor.full_state_dict(model, ranks="all"), backend="eager")
    assert sorted(compiled()) == sorted(expected)
