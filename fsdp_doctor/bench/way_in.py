"""The way in, measured: full tensors into a sharded model, from each source, by each path."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_doctor.bench import sharded_model as models
from fsdp_doctor.bench.links import Links
from fsdp_doctor.bench.measure import Clock
from fsdp_doctor.bench.request import LOAD_PATHS, BenchOptions
from fsdp_doctor.bench.tables import Measured
from fsdp_doctor.extract.sources import TensorSpec, sources_of, specs
from fsdp_doctor.fsdp import reader
from fsdp_doctor.load import load_full_tensors
from fsdp_doctor.load.writing import LOAD_BUCKET_BYTES

Tensors: TypeAlias = dict[str, torch.Tensor]
_OURS, _BASELINE, _ = LOAD_PATHS


def measured(
    options: BenchOptions, strategy: str, offload: str, dtypes: str, clock: Clock, links: Links
) -> Iterator[Measured]:
    """Every rank must go through it."""
    held, _, _ = dtypes.partition(":")
    mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),))
    model = models.build(options, strategy, offload, models.DTYPE[held], mesh)
    whole = [spec for source in sources_of(reader.read(model)) for spec in specs(source)]
    full_bytes = sum(spec.numel * spec.dtype.itemsize for spec in whole)
    sizes = _Sizes(full=full_bytes, held=clock.highest(models.shard_bytes(model)))
    tensors = _filled(whole, clock.device)
    for source in options.sources:
        least = _least_seconds(source, offload, links, sizes)
        with _given(source, tensors) as given:
            rows = []
            for path in options.paths or LOAD_PATHS:
                if not _can_load(path, source, strategy, offload):
                    continue
                load = _loader(path, offload, options.bucket_bytes[0] or LOAD_BUCKET_BYTES)
                timing = clock.timing(functools.partial(load, model, given), _nothing, options.repeat)
                rows.append(
                    Measured(
                        strategy=strategy,
                        offload=offload,
                        dtypes=held,
                        path=path,
                        source=source,
                        timing=timing,
                        full_bytes=full_bytes,
                        ratio=least / timing.seconds if least is not None and not timing.error else None,
                    )
                )
            yield from _against_torch(rows)
    del model, tensors
    gc.collect()


@dataclass(frozen=True)
class _Sizes:
    """In bytes. held: on the rank that holds the most."""

    full: float
    held: float


def _against_torch(rows: list[Measured]) -> Iterator[Measured]:
    torchs = next((row.timing for row in rows if row.path == _BASELINE and not row.timing.error), None)
    for row in rows:
        comparable = torchs is not None and not row.timing.error
        yield replace(row, times_torch=torchs.seconds / row.timing.seconds) if torchs and comparable else row


def _least_seconds(source: str, offload: str, links: Links, sizes: _Sizes) -> float | None:
    """What the link that bounds it needs; None where there is none, as for one between two hosts' memories."""
    h2d, host, file = links.h2d_pinned, links.host_copy, links.page_cache
    if h2d is None or host is None or file is None:
        return None
    resident = offload == "none"
    match source:
        case "rank0":
            # Rank 0 keeps its own part to itself.
            return sizes.full / h2d if resident else max((sizes.full - sizes.held) / h2d, sizes.held / host)
        case "files":
            return sizes.held / min(h2d, file) if resident else sizes.held / file
        case _:
            return sizes.held / (h2d if resident else host)


def _filled(whole: Sequence[TensorSpec], device: torch.device) -> Tensors:
    """Full tensors, each once, the same on every rank, in pinned memory where there is a device."""
    torch.manual_seed(0)
    tensors = {}
    for spec in whole:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, pin_memory=device.type != "cpu")
        models.fill(tensor, device)
        tensors[spec.names[0]] = tensor
    return tensors


@contextlib.contextmanager
def _given(source: str, tensors: Tensors) -> Iterator[Any]:
    """What is loaded from: nothing on ranks that have none."""
    if source != "files":
        yield tensors if source == "ranks" or dist.get_rank() == 0 else None
        return
    name = [tempfile.mkdtemp(prefix="fsdp-doctor-bench-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    directory = pathlib.Path(name[0])
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        if writes:
            from safetensors.torch import save_file

            directory.mkdir(exist_ok=True)
            save_file(tensors, directory / "model.safetensors")
        dist.barrier()
        yield directory
        dist.barrier()
    finally:
        if writes:
            shutil.rmtree(directory, ignore_errors=True)


def _can_load(path: str, source: str, strategy: str, offload: str) -> bool:
    """torch's FSDP1 is loaded on the device; without a broadcast every rank needs the tensors."""
    if path == _OURS:
        return True
    return (strategy, offload) != ("fsdp1", "param") and (path == _BASELINE or source != "rank0")


def _loader(path: str, offload: str, bucket_bytes: int) -> Callable[[nn.Module, Any], object]:
    if path == _OURS:
        return functools.partial(_ours, bucket_bytes=bucket_bytes)
    return functools.partial(_torchs, broadcast=path == _BASELINE, offload=offload)


def _ours(model: nn.Module, given: Any, *, bucket_bytes: int) -> None:
    load_full_tensors(model, given, bucket_bytes=bucket_bytes)


def _torchs(model: nn.Module, given: Any, *, broadcast: bool, offload: str) -> None:
    """torch's own; its caller's dictionary would be changed by it."""
    state = given
    if isinstance(given, pathlib.Path):
        from safetensors.torch import load_file

        state = load_file(given / "model.safetensors") if dist.get_rank() == 0 or not broadcast else {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=broadcast, cpu_offload=offload != "none", strict=False
    )
    set_model_state_dict(model, dict(state or {}), options=options)


def _nothing() -> None:
    """A load leaves nothing that has to be undone."""
