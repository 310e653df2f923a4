"""The examples that send a model's weights to an engine, with a receiver in the engine's place."""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from support import engine_modules
from support.extraction import INTEGERS, assert_same, cast_of, everywhere, fsdp2, new_net, tensors_of
from support.places import ROOT
from support.ranks import this_device, this_rank
from torch import nn

CPU = torch.device("cpu")


def example(name: str) -> ModuleType:
    path = ROOT / "examples" / "engines" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_and_expected() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns a model without integers, which the examples' dtype would refuse, and the expected tensors."""
    net = new_net()
    for name in INTEGERS:
        delattr(net, name)
    expected = cast_of(tensors_of(net), torch.bfloat16)
    return fsdp2(net), expected


@everywhere
def test_a_receiver_of_messages_holds_what_was_sent_and_says_what_differs() -> None:
    to_any = example("to_any")
    model, expected = model_and_expected()
    sent: collections.deque[Any] = collections.deque()
    to_any.sync(model, sent.append if this_rank() == 0 else None, bucket_bytes=4096)
    if this_rank() != 0:
        assert not sent
        return
    again = sent.copy()
    held = {name: torch.zeros_like(tensor, device=this_device()) for name, tensor in expected.items()}
    assert to_any.receive(held, sent.popleft) == []
    assert_same(held, expected)
    held["other"] = torch.ones(1)
    assert to_any.receive(held, again.popleft) == ["other: the trainer does not have this tensor"]


@everywhere
def test_sglang_is_given_buckets_between_begin_and_end() -> None:
    to_sglang = example("to_sglang")
    model, expected = model_and_expected()
    calls: list[str] = []
    found: dict[str, torch.Tensor] = {}
    with engine_modules.sglang("stand-in") as sglang:

        def update(named_tensors: list[bytes], load_format: str, flush_cache: bool) -> None:
            assert (len(named_tensors), load_format, flush_cache) == (2, "flattened_bucket", False)
            calls.append("update")
            found.update((name, tensor.clone()) for name, tensor in sglang.load(named_tensors[1]))

        engine = SimpleNamespace(
            begin_weight_update=lambda: calls.append("begin"),
            update_weights_from_tensor=update,
            end_weight_update=lambda: calls.append("end"),
        )
        if this_device() != CPU and this_rank() == 0:
            # The emulated device's memory cannot be shared with another process.
            engine = None
        to_sglang.sync(model, engine if this_rank() == 0 else None, 2, bucket_bytes=4096)
    if engine is not None and this_rank() == 0:
        assert calls[0] == "begin"
        assert calls[-1] == "end"
        assert len(calls) > 4
        assert_same(found, expected, CPU)


@everywhere
def test_verls_checkpoint_engine_is_given_the_generator() -> None:
    to_verl = example("to_verl")
    model, expected = model_and_expected()
    found: dict[str, torch.Tensor] = {}

    async def send_weights(weights: Any) -> None:
        found.update(weights)

    asyncio.run(to_verl.sync(model, SimpleNamespace(send_weights=send_weights)))
    assert_same(found, expected)


@everywhere
def test_vllms_trainer_is_given_a_source_and_sends() -> None:
    to_vllm = example("to_vllm")
    model, expected = model_and_expected()
    found: dict[str, torch.Tensor] = {}

    def trainer_init(init_info: Any, *, client: Any, source: Any) -> Any:
        assert (init_info.rank, init_info.packed, client) == (this_rank(), True, "client of http://engine")
        return SimpleNamespace(source=source, send_weights=lambda: found.update(source.iter_full()))

    with engine_modules.vllm("stand-in"):
        package = sys.modules["vllm.distributed.weight_transfer"]
        vars(package).update(
            HTTPVLLMWeightSyncClient="client of {}".format,
            WeightTransferTrainerFactory=SimpleNamespace(trainer_init=trainer_init),
        )
        ipc = ModuleType("vllm.distributed.weight_transfer.ipc_engine")
        ipc.IPCTrainerInitInfo = SimpleNamespace  # type: ignore[attr-defined]
        sys.modules[ipc.__name__] = ipc
        try:
            trainer = to_vllm.connect(model, "http://engine")
            to_vllm.sync(trainer)
        finally:
            del sys.modules[ipc.__name__]
    assert_same(found, expected)
