"""Persistent buffers that ranks have moved apart: somebody says so, and a kept plan asks nobody again."""

from __future__ import annotations

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from support.examined import finding, kinds
from support.extraction import assert_same, everywhere, extracted, fsdp2, mesh_over, new_net
from support.ranks import of_all_ranks, this_device, this_rank, together, world_size
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import BuffersDiffer, examine, fingerprint, full_state_dict, full_tensors, save_full_tensors
from fsdp_doctor.weights.transport import rank_groups


class Router(nn.Module):
    """Router whose bias is moved by each rank's own tokens, as of models without an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.register_buffer("bias", torch.zeros(5))
        self.register_buffer("large", torch.zeros(600, 600))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = (self.linear(hidden) + self.bias).argmax(-1)
        self.bias += torch.bincount(chosen, minlength=5) < chosen.numel() / 5
        return self.linear(hidden)


def _routed() -> nn.Module:
    torch.manual_seed(0)
    model = fully_shard(Router().to(this_device()), mesh=mesh_over())
    torch.manual_seed(this_rank())
    for _ in range(5):
        model(torch.randn(64, 8).to(this_device()) + this_rank()).sum().backward()
    return model


def _warned(function: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()  # type: ignore[operator]
    return [str(each.message) for each in caught if issubclass(each.category, BuffersDiffer)]


@everywhere
def test_buffers_that_differ_are_named_by_a_save_an_extraction_and_examine() -> None:
    model = _routed()
    own = model.bias.clone()
    assert "buffers-differ" not in kinds(examine(model))
    (message,) = _warned(lambda: extracted(model))
    assert "bias" in message
    assert "large" not in message
    assert finding(model, "buffers-differ").names == ("bias",)
    for function in (lambda: full_state_dict(model), lambda: fingerprint(model, lora="base")):
        together()
        assert len(_warned(function)) == 1
    with new_directory() as directory:
        for overwrite in (False, True):
            reports = []
            saved = _warned(
                lambda o=overwrite, r=reports: r.append(save_full_tensors(model, directory, names="model", overwrite=o))
            )
            assert len(saved) == 1
            assert reports[0].differing_buffers == ("bias",)
    assert torch.equal(model.bias, own)


@everywhere
def test_the_warning_names_the_callers_line_and_the_ranks() -> None:
    model = _routed()
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank, bias in enumerate(of_all_ranks(model.bias.tolist())):
        groups.setdefault(tuple(bias), []).append(rank)
    first, *rest = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}" for ranks in groups.values()]
    expected = f"values differ between {', '.join([first, *rest[:-1]])} and {rest[-1]}: "
    with new_directory() as directory:
        calls = [
            lambda: dict(full_tensors(model)),
            lambda: full_state_dict(model),
            lambda: fingerprint(model, lora="base"),
            lambda: save_full_tensors(model, directory, names="model"),
        ]
        for call in calls:
            together()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            (warning,) = [each for each in caught if issubclass(each.category, BuffersDiffer)]
            assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)
            assert expected in str(warning.message)


@everywhere
def test_the_remedy_for_buffers_that_differ_leaves_one_value_on_all_ranks() -> None:
    for reduce in (lambda buffer: dist.broadcast(buffer, src=0), dist.all_reduce):
        model = _routed()
        assert _warned(lambda: full_state_dict(model))  # noqa: B023
        assert "buffers-differ" in kinds(examine(model))
        reduce(model.bias)
        assert not _warned(lambda: full_state_dict(model))  # noqa: B023
        assert "buffers-differ" not in kinds(examine(model))
        assert len({tuple(bias) for bias in of_all_ranks(model.bias.tolist())}) == 1


@everywhere
def test_a_save_names_buffers_that_drifted_apart_after_the_first_extraction() -> None:
    torch.manual_seed(0)
    model = fully_shard(Router().to(this_device()), mesh=mesh_over())
    assert _warned(lambda: extracted(model)) == []
    model.bias += this_rank()
    assert _warned(lambda: extracted(model)) == []
    assert len(_warned(lambda: full_state_dict(model))) == 1
    model.bias.fill_(1)
    assert _warned(lambda: full_state_dict(model)) == []
    assert "buffers-differ" not in kinds(examine(model))


@everywhere
def test_a_kept_plan_compares_no_buffers_again() -> None:
    model = _routed()
    assert len(_warned(lambda: extracted(model))) == 1
    with mock.patch.object(rank_groups.Comparison, "make_statement", side_effect=AssertionError):
        assert _warned(lambda: extracted(model)) == []


@everywhere
def test_one_element_of_a_small_buffer_is_enough() -> None:
    model = fsdp2(new_net())
    model.table[1, 2] += this_rank() == world_size() - 1
    (message,) = _warned(lambda: extracted(model))
    assert "table" in message


@everywhere
def test_buffers_that_are_alike_are_no_word() -> None:
    model = fsdp2(new_net())
    first = extracted(model)
    assert_same(extracted(model), first)
    assert set(full_state_dict(model, ranks="all")) == set(first)
