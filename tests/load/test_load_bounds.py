"""What a load takes while it runs, what it leaves alone, and adapters, which are tensors like any others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import torch
from support.extraction import (
    MIB,
    Tensors,
    adapted,
    assert_same,
    extracted,
    fsdp1,
    fsdp2,
    new_net,
    on_the_device,
    qwen,
    shard_qwen1,
    shard_qwen2,
    tensors_of,
)
from support.loading import everywhere, items_of, on_first, other_tensors
from support.ranks import accelerator, device_type, this_device
from torch import nn

from fsdp_doctor import load_full_tensors
from fsdp_doctor.fsdp.names import without_adapters

_LARGE = {"large_rows": 4 * 1024, "empty": False}


def _peak(model: nn.Module, source: object, bucket_bytes: int) -> int:
    """Device memory beyond what there was."""
    gc.collect()
    module = accelerator()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    load_full_tensors(model, source, bucket_bytes=bucket_bytes)
    assert module.memory_allocated() == before
    return int(module.max_memory_allocated() - before)


@on_the_device
def test_two_buckets_of_device_memory_are_enough_however_large_a_tensor_is() -> None:
    expected = other_tensors(**_LARGE)
    assert expected["large.weight"].nbytes == 8 * MIB
    for model in (fsdp2(new_net(**_LARGE)), fsdp1(new_net(**_LARGE))):
        for source in (on_first(expected), on_first(items_of(expected))):
            assert _peak(model, source, MIB) <= 2 * MIB + MIB // 8
        assert_same(extracted(model), expected)


@on_the_device
def test_who_reads_its_own_rows_takes_no_device_memory() -> None:
    expected = other_tensors(**_LARGE)
    for model in (fsdp2(new_net(**_LARGE)), fsdp1(new_net(**_LARGE))):
        assert _peak(model, expected, MIB) == 0


class _Made(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for. alive: how many there are; most: there ever were."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.alive = self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        made = self._tensors[name].clone()
        weakref.finalize(made, self._gone)
        self.alive += 1
        self.most = max(self.most, self.alive)
        return made

    def _gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@everywhere
def test_a_mapping_that_makes_its_tensors_when_asked_is_never_held_as_a_whole() -> None:
    expected = other_tensors()
    for source in (on_first, lambda tensors: tensors):
        model, made = fsdp2(new_net()), _Made(expected)
        load_full_tensors(model, source(made))
        assert_same(extracted(model), expected)
        assert made.most <= 4, made.most


@everywhere
def test_the_callers_context_is_the_same_inside_an_iterator_and_afterwards() -> None:
    seen: list[tuple[bool, bool, bool]] = []
    current = torch.get_device_module(device_type()).current_stream if device_type() != "cpu" else lambda: None
    stream = current()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for item in other_tensors().items():
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current() == stream))
            yield item

    model = fsdp2(new_net())
    load_full_tensors(model, source())
    assert set(seen) == {(True, False, True)}
    for mode, wanted in ((torch.no_grad, (False, False, True)), (torch.inference_mode, (False, True, True))):
        seen.clear()
        with mode():
            load_full_tensors(model, source())
        assert set(seen) == {wanted}
    assert torch.is_grad_enabled()
    assert current() == stream
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "frozen" not in name)


@on_the_device
def test_a_tensor_that_is_on_its_way_to_the_device_is_loaded_as_it_will_be_there() -> None:
    model, expected = fsdp2(new_net()), other_tensors()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in expected.items():
            yield name, tensor.pin_memory().to(this_device(), non_blocking=True)

    load_full_tensors(model, on_first(source()))
    assert_same(extracted(model), expected)


@everywhere
def test_adapters_and_the_weights_below_them_are_loaded_under_their_own_names() -> None:
    torch.manual_seed(3)
    expected = {name: torch.randn_like(tensor) for name, tensor in tensors_of(adapted(qwen())).items()}
    for build in [shard_qwen2] if device_type() == "cpu" else [shard_qwen2, shard_qwen1]:
        model = build(adapted(qwen()))
        report = load_full_tensors(model, on_first(expected))
        assert report.loaded == len(expected)
        factors = {name.replace(".default", ""): t for name, t in expected.items() if "lora_" in name}
        below = {without_adapters(name): t for name, t in expected.items() if "lora_" not in name}
        assert_same(extracted(model, lora="adapter"), factors)
        assert_same(extracted(model, lora="base"), below)
