"""The benchmark itself, on every rank: links, then each model and each path over it."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_doctor.bench import candidates, links as ceilings, sharded_model as models, way_in
from fsdp_doctor.bench.links import Links
from fsdp_doctor.bench.measure import Clock
from fsdp_doctor.bench.request import BenchOptions
from fsdp_doctor.bench.tables import BenchResult, Measured
from fsdp_doctor.case.offloading import offload
from fsdp_doctor.case.paths.arguments import PathArguments, called_by_name
from fsdp_doctor.errors import CannotRun
from fsdp_doctor.extract.sources import sources_of, specs
from fsdp_doctor.fsdp import reader
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.environment import collect
from fsdp_doctor.machine.launch import Place, place
from fsdp_doctor.matrix.paths import is_user_path

_LINK_BYTES = 1 << 30
_SMALL_LINK_BYTES = 16 << 20


def run(options: BenchOptions) -> BenchResult:
    """Every rank must call it."""
    here = place()
    for path in filter(is_user_path, options.paths):
        candidates.users_function(path)
    device = _start(options.device, here)
    if device.type == "cpu" and set(options.strategies) != {"fsdp2"}:
        raise CannotRun("torch's FSDP1 needs an accelerator: --strategy fsdp2, or --device emulated")
    try:
        clock = Clock(device)
        real = device.type not in ("cpu", "emulated")
        links = ceilings.measure(clock, _LINK_BYTES if real else _SMALL_LINK_BYTES, options.direction)
        result = BenchResult(
            command="fsdp-doctor " + " ".join(sys.argv[1:]),
            device=device.type,
            world_size=here.world_size,
            environment=collect(host_name=False),
            processor=_processor(),
            links=links,
        )
        measured = way_in.measured if options.direction == "in" else _model
        for strategy in options.strategies:
            for offload in options.offloads:
                for dtypes in options.dtypes:
                    result.measured += measured(options, strategy, offload, dtypes, clock, links)
        return result
    finally:
        dist.destroy_process_group()


def _start(asked: str, here: Place) -> torch.device:
    kind = devices.RunDevice(type=devices.resolve(asked))
    devices.load(kind, asked)
    if kind.type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    devices.check_there_is_one(kind.type, rank=here.rank, local_rank=here.local_rank)
    device = torch.device(kind.type, here.local_rank)
    torch.get_device_module(device).set_device(device)
    if device.type == "emulated":
        torch.get_device_module(device).set_late_completion(False)
    backend = dist.get_default_backend_for_device(kind.type)
    dist.init_process_group(f"cpu:gloo,{kind.type}:{backend}")
    return device


def _processor() -> str:
    """Its name: how fast a host is decides where a link does not."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _model(
    options: BenchOptions, strategy: str, offload: str, dtypes: str, clock: Clock, links: Links
) -> Iterator[Measured]:
    held, _, yielded = dtypes.partition(":")
    yielded_dtype = models.DTYPE[yielded] if yielded else None
    mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),))
    model = models.build(options, strategy, offload, models.DTYPE[held], mesh)
    arguments = PathArguments(model=model, device=clock.device)
    held_bytes = clock.highest(models.shard_bytes(model))
    yielded_specs = [spec for source in sources_of(reader.read(model)) for spec in specs(source)]
    full_bytes = sum(spec.numel * (yielded_dtype or spec.dtype).itemsize for spec in yielded_specs)
    about = _About(
        strategy, offload, dtypes, yielded_dtype, _least_seconds(offload, links, held_bytes, full_bytes), full_bytes
    )
    for row in candidates.rows(strategy, options.paths, dtype=yielded_dtype, bucket_bytes=options.bucket_bytes):
        if offload not in row.offloads:
            continue
        yield _measured(row, arguments, clock, options.repeat, about)
    del model, arguments
    gc.collect()


@dataclass(frozen=True)
class _About:
    """One model: how it is held, what is asked of it, and the seconds and bytes that this takes at the least."""

    strategy: str
    offload: str
    dtypes: str
    yielded_dtype: torch.dtype | None
    least_seconds: float | None
    full_bytes: int


def _measured(row: candidates.Row, arguments: PathArguments, clock: Clock, repeat: int, about: _About) -> Measured:
    function = called_by_name(row.function)

    def once() -> None:
        candidates.consume(function(arguments), about.yielded_dtype)

    def restored() -> None:
        if row.moves_model:
            offload(arguments.model, non_blocking=False)

    timing = clock.timing(once, restored, repeat)
    has_ceiling = about.least_seconds is not None and not row.to_host and not timing.error
    return Measured(
        strategy=about.strategy,
        offload=about.offload,
        dtypes=about.dtypes,
        path=row.name,
        full_bytes=about.full_bytes,
        timing=timing,
        ratio=(about.least_seconds or 0.0) / timing.seconds if has_ceiling else None,
        bucket_bytes=row.bucket_bytes,
    )


def _least_seconds(offload: str, links: Links, held_bytes: float, full_bytes: int) -> float | None:
    """What the link that bounds it needs; None where there is none.

    The link from the host bounds it if the shards lie there, else the one between the ranks.
    """
    size = dist.get_world_size()
    if offload == "none" or links.h2d_pinned is None or links.h2d_pageable is None:
        rate, nbytes = links.all_gather, full_bytes * (size - 1) / size
    else:
        rate, nbytes = links.h2d_pinned if offload == "policy" else links.h2d_pageable, held_bytes
    return None if rate is None else nbytes / rate
