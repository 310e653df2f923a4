"""Full tensors collected on the host: for checkpoints."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.extract.full import BUCKET_BYTES, announced, extract
from fsdp_doctor.extract.host_copies import flat_bytes, threads_of_a_rank
from fsdp_doctor.extract.kept_plans import Arguments
from fsdp_doctor.extract.lora import Lora
from fsdp_doctor.extract.without_autograd import without_autograd

CollectingRanks = Literal["rank0", "all"]

_CHUNK_BYTES = 32 << 20
_MOST_THREADS = 8


@without_autograd
def full_state_dict(
    model: nn.Module,
    *,
    ranks: CollectingRanks = "rank0",
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
) -> dict[str, torch.Tensor]:
    """The whole model's tensors on the CPU, by name, in pageable memory; tied names share one tensor.

    Every rank must call it, as :func:`full_tensors`, whose arguments, names, bounds and errors it
    shares. Host memory: the model on each rank that collects, and 256 MiB that are pinned.

    ranks: ``rank0`` the first rank of the default group, the others get an empty dict; ``all``.

    Raises ValueError for another word.
    """
    with announced(model):
        if ranks not in get_args(CollectingRanks):
            raise ValueError(f"ranks must be one of {', '.join(get_args(CollectingRanks))}, not {ranks!r}")
        arguments = Arguments.given(None, dtype, keep_dtype, bucket_bytes, lora)
    collects = ranks == "all" or not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    with _HostCopies() as copies, contextlib.closing(extract(model, arguments)) as tensors:
        for spec, tensor in tensors:
            if collects:
                state |= dict.fromkeys(spec.names, copies.start(tensor))
            del tensor
    return state


class _HostCopies:
    """Copies device tensors into pageable memory: the device into pinned chunks, threads out of them.

    One thread alone fills fresh pageable memory at a fraction of what the link delivers, since each
    page is faulted in first.
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_chunks = 0
        self._jobs: list[Future[None]] = []
        self._most_chunks = threads_of_a_rank(_MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._most_chunks)

    def __enter__(self) -> _HostCopies:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pool.shutdown(wait=True)
        for job in self._jobs:
            job.result()

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor that holds ``tensor`` once this manager is left."""
        if tensor.device.type == "cpu":
            return tensor
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        parts = zip(flat_bytes(tensor).split(_CHUNK_BYTES), flat_bytes(host).split(_CHUNK_BYTES), strict=True)
        for source, target in parts:
            chunk = self._chunk()
            pinned = chunk[: source.numel()]
            pinned.copy_(source, non_blocking=True)
            arrival = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()
            self._jobs.append(self._pool.submit(self._finish, arrival, chunk, pinned, target))
        return host

    def _chunk(self) -> torch.Tensor:
        if self._num_chunks < self._most_chunks:
            self._num_chunks += 1
            return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._free.get()

    def _finish(self, arrival: Any, chunk: torch.Tensor, pinned: torch.Tensor, target: torch.Tensor) -> None:
        try:
            arrival.synchronize()
            target.copy_(pinned)
        finally:
            self._free.put(chunk)
