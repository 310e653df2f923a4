"""Measures the links, then each method on each sharded model, on every rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import assert_never

from bench.measure import Clock, Links, measure_links
from bench.request import FULL_STATE_DICT, LOADS, BenchOptions, BenchSource, list_extractions
from bench.results import BenchResult, Measured
from bench.sharded_model import DTYPE, fill, shard_bytes, shard_model
from fsdp_doctor.case import offloading
from fsdp_doctor.case.methods.lookup import MethodArguments, call_by_name, find_function, load_user_method
from fsdp_doctor.errors import CannotRun
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.environment import collect
from fsdp_doctor.machine.launch import Place, read_place
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.methods import find_method, is_user_method
from fsdp_doctor.plan.meta_model import build_on_meta
from fsdp_doctor.weights.extract import BUCKET_BYTES, full_state_dict, full_tensors
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.load import load_full_tensors
from fsdp_doctor.weights.load.full_load import LOAD_BUCKET_BYTES
from fsdp_doctor.weights.transport.sources import TensorSpec, list_sources, list_specs

Tensors: TypeAlias = dict[str, torch.Tensor]
_LINK_BYTES = 1 << 30
_SMALL_LINK_BYTES = 16 << 20
# The arguments that a method can have. There is no optimizer, because nothing is trained here.
_GIVEN = ("model", "device")
_OURS, _BROADCAST, _ = LOADS


def run(options: BenchOptions) -> BenchResult:
    """Measures everything that the options name. Every rank must call this function.

    Raises UsageError for a method that needs other arguments than a model and a device.
    """
    here = read_place()
    for method in filter(is_user_method, options.methods):
        load_user_method(method, _GIVEN)
    device = _start(options.device, here)
    if device.type == "cpu" and any(scenario.version == 1 for scenario in options.scenarios):
        raise CannotRun("torch's FSDP1 needs an accelerator: --strategy fsdp2, or --device emulated")
    try:
        clock = Clock(device)
        is_real = device.type not in ("cpu", "emulated")
        links = measure_links(clock, _LINK_BYTES if is_real else _SMALL_LINK_BYTES, options.direction)
        result = BenchResult(
            command="benchmarks/weights.py " + " ".join(sys.argv[1:]),
            device=device.type,
            world_size=here.world_size,
            environment=collect(host_name=False),
            processor=_name_processor(),
            links=links,
        )
        measure = _measure_loads if options.direction == "in" else _measure_extractions
        for scenario in options.scenarios:
            for dtypes in options.dtypes:
                result.measured += measure(_Model(options, scenario, dtypes, clock), options, links)
                gc.collect()
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


def _name_processor() -> str:
    """Returns the processor's name, because the speed of the host decides the result where no link does."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


class _Model:
    """A sharded model of one scenario.

    dtypes: the dtypes of the shards and of the output, in the form of the options.
    dtype: the dtype of the yielded tensors; None for the shards' dtype.
    """

    def __init__(self, options: BenchOptions, scenario: Scenario, dtypes: str, clock: Clock) -> None:
        self.scenario = scenario
        self.dtypes = dtypes
        self.clock = clock
        self.shard_dtype, _, output_dtype = dtypes.partition(":")
        self.dtype = DTYPE[output_dtype] if output_dtype else None
        mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),))
        self.model = shard_model(
            build_on_meta(options.model, options.layers, dtype=DTYPE[self.shard_dtype]), scenario, mesh
        )
        self.tensors = [spec for source in list_sources(reader.read(self.model)) for spec in list_specs(source)]
        self.shard_bytes = clock.find_highest(shard_bytes(self.model))

    @property
    def full_bytes(self) -> int:
        return sum(spec.numel * (self.dtype or spec.dtype).itemsize for spec in self.tensors)


def _measure_extractions(sharded: _Model, options: BenchOptions, links: Links) -> Iterator[Measured]:
    """Yields the result of each extraction method. Every rank must exhaust the iterator."""
    model, scenario, clock = sharded.model, sharded.scenario, sharded.clock
    arguments = MethodArguments(model=model, device=clock.device)
    there = list_extractions(scenario)
    is_staged = scenario.staging.is_staged

    def restore() -> None:
        if is_staged:
            offloading.offload(model, non_blocking=False)

    least = _compute_least_extraction_seconds(sharded, links)
    for name in options.methods or there:
        if name not in there and not is_user_method(name):
            continue
        is_ours = name in ("full_tensors", FULL_STATE_DICT)
        ends_on_host = name in (FULL_STATE_DICT, "get_model_state_dict.full+cpu")
        for bucket_bytes in options.bucket_bytes if is_ours else (None,):
            function = call_by_name(_choose_extraction(name, scenario, sharded.dtype, bucket_bytes))

            def once(function: Callable[[MethodArguments], Any] = function) -> None:
                if is_staged:
                    offloading.load(model, clock.device, non_blocking=False)
                _consume(function(arguments), sharded.dtype)

            timing = clock.time_runs(once, restore, options.repeat)
            has_ceiling = least is not None and not ends_on_host and not timing.error
            yield Measured(
                scenario=scenario,
                dtypes=sharded.dtypes,
                method=name,
                full_bytes=sharded.full_bytes,
                timing=timing,
                ratio=(least or 0.0) / timing.seconds if has_ceiling else None,
                bucket_bytes=bucket_bytes,
            )


def _choose_extraction(
    name: str, scenario: Scenario, dtype: torch.dtype | None, bucket_bytes: int | None
) -> Callable[..., Any]:
    match name:
        case "full_tensors":
            return functools.partial(full_tensors, dtype=dtype, bucket_bytes=bucket_bytes or BUCKET_BYTES)
        case _ if name == FULL_STATE_DICT:
            return functools.partial(full_state_dict, dtype=dtype, bucket_bytes=bucket_bytes or BUCKET_BYTES)
        case _ if is_user_method(name):
            return load_user_method(name, _GIVEN)[0]
        case _:
            return find_function(find_method(name, scenario.version))


def _consume(result: Any, dtype: torch.dtype | None) -> None:
    """Exhausts the result of a method, casts tensors that the method did not cast, and keeps only the last tensor."""
    for _, value in result.items() if isinstance(result, Mapping) else result:
        if isinstance(value, torch.Tensor) and dtype is not None:
            value.to(dtype)


def _compute_least_extraction_seconds(sharded: _Model, links: Links) -> float | None:
    """Returns the seconds that the limiting link needs; None if there is no such link.

    If the shards are on the host, the limit is the link from the host to the device; otherwise it is the link between
    the ranks.
    """
    size, scenario = dist.get_world_size(), sharded.scenario
    if not scenario.offload or links.h2d_pinned is None or links.h2d_pageable is None:
        rate, nbytes = links.all_gather, sharded.full_bytes * (size - 1) / size
    else:
        is_pinned = scenario.policy and scenario.pinning.is_pinned
        rate, nbytes = links.h2d_pinned if is_pinned else links.h2d_pageable, sharded.shard_bytes
    return None if rate is None else nbytes / rate


def _measure_loads(sharded: _Model, options: BenchOptions, links: Links) -> Iterator[Measured]:
    """Yields the result of each load method. Every rank must exhaust the iterator."""
    scenario, clock = sharded.scenario, sharded.clock
    full_bytes = sum(spec.numel * spec.dtype.itemsize for spec in sharded.tensors)
    tensors = _make_full_tensors(sharded.tensors, clock.device)
    for source in options.sources:
        least = _compute_least_load_seconds(source, scenario, links, full_bytes, sharded.shard_bytes)
        with _give_source(source, tensors) as given:
            rows = []
            for name in options.methods or LOADS:
                if not _can_load(name, source, scenario):
                    continue
                load = _choose_load(name, scenario, options.bucket_bytes[0] or LOAD_BUCKET_BYTES)
                # Nothing has to be restored after a load.
                timing = clock.time_runs(functools.partial(load, sharded.model, given), lambda: None, options.repeat)
                rows.append(
                    Measured(
                        scenario=scenario,
                        dtypes=sharded.shard_dtype,
                        method=name,
                        source=source.value,
                        timing=timing,
                        full_bytes=full_bytes,
                        ratio=least / timing.seconds if least is not None and not timing.error else None,
                    )
                )
            yield from _compare_with_broadcast(rows)


def _compare_with_broadcast(rows: list[Measured]) -> Iterator[Measured]:
    broadcast = next((row.timing for row in rows if row.method == _BROADCAST and not row.timing.error), None)
    for row in rows:
        times = broadcast.seconds / row.timing.seconds if broadcast and not row.timing.error else None
        yield replace(row, times_torch=times)


def _compute_least_load_seconds(
    source: BenchSource, scenario: Scenario, links: Links, full: float, shards: float
) -> float | None:
    """Returns the seconds that the limiting link needs; None if no measured link limits the load.

    full: the bytes of all full tensors.
    shards: the bytes of the shards on the rank that has the most.
    """
    h2d, host, file = links.h2d_pinned, links.host_copy, links.page_cache
    if h2d is None or host is None or file is None:
        return None
    is_resident = not scenario.offload
    match source:
        case BenchSource.RANK0:
            # Rank 0 does not send its own part.
            return full / h2d if is_resident else max((full - shards) / h2d, shards / host)
        case BenchSource.FILES:
            return shards / min(h2d, file) if is_resident else shards / file
        case BenchSource.RANKS:
            return shards / (h2d if is_resident else host)
        case _:
            assert_never(source)


def _make_full_tensors(wanted: Sequence[TensorSpec], device: torch.device) -> Tensors:
    """Makes each full tensor once, with the same values on every rank, in pinned memory if there is a device."""
    torch.manual_seed(0)
    tensors = {}
    for spec in wanted:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, pin_memory=device.type != "cpu")
        fill(tensor, device)
        tensors[spec.names[0]] = tensor
    return tensors


@contextlib.contextmanager
def _give_source(source: BenchSource, tensors: Tensors) -> Iterator[Any]:
    """Yields the argument of a load: a mapping, a directory of files, or None on ranks without tensors."""
    if source is not BenchSource.FILES:
        yield tensors if source is BenchSource.RANKS or dist.get_rank() == 0 else None
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


def _can_load(name: str, source: BenchSource, scenario: Scenario) -> bool:
    """Returns whether the method supports the source and the scenario.

    torch can load FSDP1 with flat parameters only on the device. A method other than torch's broadcast needs the
    tensors on every rank.
    """
    if name == _OURS:
        return True
    is_flat = scenario.version == 1 and not scenario.strategy.uses_original_parameters
    return not (is_flat and scenario.param_offload) and (name == _BROADCAST or source is not BenchSource.RANK0)


def _choose_load(name: str, scenario: Scenario, bucket_bytes: int) -> Callable[[nn.Module, Any], object]:
    if name == _OURS:
        return functools.partial(load_full_tensors, bucket_bytes=bucket_bytes)
    is_broadcast, is_offloaded = name == _BROADCAST, bool(scenario.offload)

    def load_by_torch(model: nn.Module, given: Any) -> None:
        state = given
        if isinstance(given, pathlib.Path):
            from safetensors.torch import load_file

            state = load_file(given / "model.safetensors") if dist.get_rank() == 0 or not is_broadcast else {}
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=is_broadcast, cpu_offload=is_offloaded, strict=False
        )
        # The dictionary is copied, because torch changes it.
        set_model_state_dict(model, dict(state or {}), options=options)

    return load_by_torch
