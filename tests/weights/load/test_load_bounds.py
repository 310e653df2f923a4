"""Tests what a load takes while it runs, what it leaves alone, and tensors that few models have."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import weakref
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save_file
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
from support.loading import everywhere, items_of, local_of, on_first, other_tensors
from support.ranks import Setting, accelerator, device_type, on_ranks, this_device, this_rank, together, world_size
from support.training import shared_directory
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import load_full_tensors
from fsdp_doctor.checkpoints.names import strip_adapters

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
def test_a_lazy_mapping_of_tensors_is_never_held_as_a_whole() -> None:
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
def test_a_tensor_still_being_copied_is_loaded_as_it_will_be() -> None:
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
        below = {strip_adapters(name): t for name, t in expected.items() if "lora_" not in name}
        assert_same(extracted(model, lora="adapter"), factors)
        assert_same(extracted(model, lora="base"), below)


class _Rare(nn.Module):
    """Model of dtypes and shapes that few models have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.randn(1))
        self.fp8 = nn.Parameter(torch.randn(6, 2).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(bool(seed)))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("none_of_it", torch.empty(0, dtype=torch.int32))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e5m2))
        self.register_buffer("signed", torch.full((3,), -seed, dtype=torch.int8))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def _assert_filled(model: nn.Module, expected: Tensors) -> None:
    """Each rank looks at its own part: gloo gathers none of these dtypes."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sorted(held) == sorted(expected)
    for name, full in expected.items():
        local = local_of(held[name])
        if isinstance(held[name], nn.Parameter):
            rows = -(-len(full) // world_size())
            full = full[rows * this_rank() : rows * (this_rank() + 1)]
        assert local.dtype == full.dtype, name
        assert torch.equal(_bytes(local), _bytes(full)), name


@contextlib.contextmanager
def _file(tensors: Tensors) -> Iterator[pathlib.Path]:
    with shared_directory() as name:
        path = pathlib.Path(name) / "model.safetensors"
        if this_rank() == 0:
            save_file(tensors, path)
        together()
        yield path


@on_ranks(Setting("cpu", 2))
def test_rare_dtypes_scalars_and_empty_tensors_are_filled_bit_by_bit() -> None:
    expected = _Rare(3).state_dict()
    conjugate = expected | {"complex": expected["complex"].conj()}
    with _file(expected) as method:
        for source in (expected, on_first(expected), method, on_first(method), on_first(iter(expected.items()))):
            model = fully_shard(_Rare(0))
            load_full_tensors(model, source, bucket_bytes=1)
            _assert_filled(model, expected)
    model = fully_shard(_Rare(0))
    load_full_tensors(model, conjugate)
    _assert_filled(model, conjugate)


@everywhere
def test_the_callers_default_device_and_inference_mode_have_no_say() -> None:
    expected = other_tensors()
    for context in (torch.device("meta"), torch.inference_mode()):
        for source in (expected, on_first(expected)):
            model = fsdp2(new_net())
            with context:
                load_full_tensors(model, source)
            assert_same(extracted(model), expected)
            assert not any(parameter.is_inference() for parameter in model.parameters())
