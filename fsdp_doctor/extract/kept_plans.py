"""The plan of an extraction: made once for a model and its arguments, kept for as long as the model is as it was."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_doctor.errors import some
from fsdp_doctor.extract import lora as adapters
from fsdp_doctor.extract.agreement import ComparedPlan
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.lora import Lora, LoraAdapter
from fsdp_doctor.extract.plan import Plan, buckets, most_bytes, ranks_of, ready_places, shard_groups, signature
from fsdp_doctor.extract.rank_groups import read_groups
from fsdp_doctor.extract.sources import (
    Source,
    check_shards,
    compute_device,
    device_of,
    shards_of,
    sources_of,
    specs,
)
from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection
from fsdp_doctor.fsdp.snapshot import Snapshot

# Of one model: a trainer asks for its weights in a few ways.
_MOST_PLANS = 4


@dataclass(frozen=True)
class Arguments:
    """Of ``full_tensors``."""

    device: torch.device | str | None
    dtype: torch.dtype | None
    keep_dtype: tuple[str, ...]
    bucket_bytes: int
    lora: Lora

    @classmethod
    def given(
        cls,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        keep_dtype: Collection[str],
        bucket_bytes: int,
        lora: Lora,
    ) -> Arguments:
        """Raises ValueError for a word or a number that makes no sense, TypeError for what is none."""
        adapters.check(lora)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        if not isinstance(bucket_bytes, int):
            raise TypeError(f"bucket_bytes must be an int, not {bucket_bytes!r}")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        keep = [keep_dtype] if isinstance(keep_dtype, str) or not isinstance(keep_dtype, Iterable) else keep_dtype
        if not all(isinstance(pattern, str) for pattern in keep):
            raise TypeError(f"keep_dtype must be names, or patterns of them, not {keep_dtype!r}")
        return cls(device, dtype, tuple(keep), bucket_bytes, lora)


class _Kept:
    """A plan, and what it was made from."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        held = reader.read(model)
        if unused := held.unused():
            raise RuntimeError(
                f"FSDP2 does not compute with what the model has as {some(unused)}: it was assigned or swapped after "
                "the first forward. Copy values into the parameter that FSDP2 has instead of replacing it or its memory"
            )
        peft_modules = adapters.adapter_modules(reader.innermost(model))
        self._snapshot = Snapshot(model, held)
        self._peft_modules = [(prefix, weakref.ref(module)) for prefix, module in peft_modules]
        self._layers = adapters.read(peft_modules)
        self.shards = shards_of(held)
        self.plan = _plan(held, self.shards, self._layers, arguments)
        asked = [torch.device(arguments.device).type] if arguments.device is not None else []
        self._kinds = {*(group.device.type for group in shard_groups(self.plan.all_sources)), *asked}
        self._current = self._current_devices()

    def shards_now(self, model: nn.Module) -> list[torch.Tensor] | None:
        """None if the model is not any more what the plan was made from."""
        shards = self._snapshot.shards(model)
        if shards is None or self._current_devices() != self._current:
            return None
        layers = adapters.read((prefix, module) for prefix, known in self._peft_modules if (module := known()))
        return shards if layers == self._layers else None

    def _current_devices(self) -> list[torch.device]:
        """This rank's, of the kinds that shards are gathered on or that were asked for: a thread may change them."""
        return [device_of(kind) for kind in self._kinds]


_kept: weakref.WeakKeyDictionary[nn.Module, dict[Arguments, _Kept]] = weakref.WeakKeyDictionary()
# Plans know process groups, which are not to outlive the interpreter's modules.
atexit.register(_kept.clear)


@without_garbage_collection
def plan_of(model: nn.Module, arguments: Arguments) -> tuple[Plan, list[torch.Tensor]]:
    """The plan, and this rank's shards as they are now, by the places of the sources."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    plans = _kept.get(model, {})
    kept = plans.get(arguments)
    shards = kept.shards_now(model) if kept is not None else None
    if kept is None or shards is None:
        kept = _Kept(model, arguments)
        shards, kept.shards = kept.shards, []
    # In the order of their last use.
    others = [(known, plan) for known, plan in plans.items() if known != arguments]
    _kept[model] = dict([*others[1 - _MOST_PLANS :], (arguments, kept)])
    return kept.plan, shards


def forget(model: nn.Module) -> None:
    """The next plan of the model is made anew."""
    _kept.pop(model, None)


def _plan(
    held: reader.HeldModel, shards: Sequence[torch.Tensor], layers: adapters.Layers, arguments: Arguments
) -> Plan:
    everything = sources_of(held)
    check_shards(everything, shards)
    sources, merged = adapters.select(layers, everything, arguments.lora)
    dtypes = OutputDtypes(arguments.dtype, arguments.keep_dtype)
    dtypes.check(sources)
    computes = compute_device(held, everything)
    device = _device(arguments.device, computes, bool(shard_groups(everything)))
    factors = adapters.factors(everything, merged)
    groups = read_groups(held)
    settings = f"dtype={dtypes.dtype} bucket_bytes={arguments.bucket_bytes} lora={arguments.lora}"
    return Plan(
        all_sources=everything,
        sources=sources,
        merges=layers.found and arguments.lora == "merged",
        adapters=merged,
        factors=factors,
        dtypes=dtypes,
        device=device,
        ranks=groups.ranks or ranks_of(everything),
        groups=groups.of({source.place for source in (*sources, *factors.values())}),
        buckets=list(buckets(sources, dtypes, arguments.bucket_bytes, _extra_bytes(merged, factors))),
        most_bytes=most_bytes(sources, dtypes, arguments.bucket_bytes),
        ready=ready_places(sources, shards, dtypes, device, merged),
        compared=ComparedPlan(signature(sources, dtypes, settings, merged)),
    )


def _extra_bytes(merged: Mapping[str, list[LoraAdapter]], factors: Mapping[str, Source]) -> dict[str, int]:
    """By the name of a weight: what its adapters take while they are merged into it."""
    return {
        weight: 2 * sum(s.numel * s.dtype.itemsize for a in many for f in (a.a, a.b) for s in specs(factors[f]))
        for weight, many in merged.items()
    }


def _device(asked: torch.device | str | None, computes: torch.device, is_sharded: bool) -> torch.device:
    if asked is None:
        return computes
    device = torch.device(asked)
    if not is_sharded:
        return device if device.index is not None or device.type in ("cpu", "meta") else device_of(device.type)
    if device.type != computes.type or device.index not in (None, computes.index):
        raise ValueError(f"device={device}: the model's shards are gathered on {computes}")
    return computes
