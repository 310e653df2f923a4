"""Watches the stages of a job on one rank: each storage that an operator allocates, by class, until it is freed.

As in ``torch.distributed._tools.mem_tracker``, a dispatch mode sees the results of operators, and weak references
report when storages are freed. There are three differences from ``mem_tracker``. The memory is real and not fake, and
its sum is compared with the allocator's counters. The class of a storage follows from the file of torch's FSDP or
optimizers that allocates it, so only the resizing of storages is patched. The log of a stage is replayed after the
stage, so a storage counts at the peak under its final class, for example as a gradient.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from fsdp_doctor.examination.live_memory import (
    DeviceCounters,
    count_device_bytes,
    count_host_memory,
    is_wrapper,
    list_owned_tensors,
    list_storages,
    list_tensors,
)
from fsdp_doctor.examination.memory_records import Bytes, JobStage, MemoryClass, StageMemory
from fsdp_doctor.weights.fsdp import private

_OPTIMIZERS = "/torch/optim/"
_FSDP = "/torch/distributed/fsdp/"
# The class of the storages that each file of torch's FSDP allocates. The innermost function on the stack decides; for a
# file with None, its caller decides. A file that is not listed here is newer than this table: "unexplained".
_MADE_IN: dict[str, MemoryClass | None] = {
    "_fully_shard/_fsdp_collectives.py": "communication buffers",
    "_fully_shard/_fsdp_common.py": None,
    "_fully_shard/_fsdp_init.py": "unsharded parameters",
    "_fully_shard/_fsdp_param.py": "unsharded parameters",
    "_fully_shard/_fsdp_param_group.py": "communication buffers",
    "_fully_shard/_fsdp_state.py": "activations",
    "_fully_shard/_fully_shard.py": "parameters",
    "_common_utils.py": None,
    "_flat_param.py": "unsharded parameters",
    "_fsdp_extensions.py": None,
    "_init_utils.py": "unsharded parameters",
    "_optim_utils.py": "communication buffers",
    "_runtime_utils.py": "communication buffers",
    "_shard_utils.py": "communication buffers",
    "_state_dict_utils.py": "communication buffers",
    "_unshard_param_utils.py": "unsharded parameters",
    "fully_sharded_data_parallel.py": None,
    "sharded_grad_scaler.py": "gradients",
}
# Functions that make shards to be gathered, and functions that make or move the shards themselves.
_MADE_BY: dict[str, MemoryClass] = {
    "all_gather_inputs": "communication buffers",
    "_use_low_precision_shard": "communication buffers",
    "_init_sharded_param": "parameters",
    "reset_sharded_param": "parameters",
    "flat_param_to": "parameters",
}
# Functions that are given the gradients of a unit, as the backward made them.
_REDUCES = ("foreach_reduce", "foreach_reduce_scatter_copy_in", "_post_backward_hook", "_reduce_grad")


class TrackedStorage:
    """A live storage with its class and bytes.

    is_owned: whether the class comes from the owner of the storage, and not from the function that allocated it.
    """

    __slots__ = ("__weakref__", "is_owned", "memory_class", "nbytes", "reference")

    def __init__(self, memory_class: MemoryClass, nbytes: int) -> None:
        self.memory_class = memory_class
        self.is_owned = False
        self.nbytes = nbytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class StorageTracker(private.OperatorMode):
    """A context manager that tracks the storages of one device.

    otherwise: the class of storages that no known function allocates.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._live: dict[int, TrackedStorage] = {}
        self._log: list[tuple[TrackedStorage, int]] = []
        self._class_in: dict[CodeType, MemoryClass | None] = {}
        self.otherwise: MemoryClass = "activations"

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What a wrapper such as DTensor does with its local tensors comes here after it.
        if any(map(is_wrapper, types)):
            return NotImplemented
        result = func(*args, **kwargs or {})
        maker = self._find_maker()
        for tensor in list_tensors(result):
            for storage in list_storages(tensor):
                self._see(storage, maker)
        if maker is not None and maker.co_name in _REDUCES:
            self._note_gradients(args)
        return result

    @contextlib.contextmanager
    def track(self, otherwise: MemoryClass) -> Iterator[None]:
        """Tracks the operators of a stage and FSDP's calls of ``UntypedStorage.resize_``, which is not an operator.

        otherwise: the class of storages that no known function allocates.
        """
        self.otherwise = otherwise
        self._log = []
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._see(storage, self._find_maker())
            return result

        with self:
            torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def set_classes(self, tensors: Iterable[tuple[MemoryClass, torch.Tensor]]) -> None:
        """Sets the class of tensors whose owner is known; if a storage is listed several times, the first counts."""
        seen: set[int] = set()
        for memory_class, tensor in tensors:
            for storage in list_storages(tensor):
                if storage.device == self._device and id(storage) not in seen:
                    seen.add(id(storage))
                    tracked = self._live.get(id(storage)) or self._add(storage, memory_class)
                    tracked.memory_class = memory_class
                    tracked.is_owned = True

    def set_output(self, tensor: torch.Tensor) -> None:
        """Counts a tensor as an output of an extraction, unless it has an owner, like a parameter that is yielded."""
        for storage in list_storages(tensor):
            tracked = self._live.get(id(storage))
            if tracked is not None and not tracked.is_owned and tracked.memory_class != "unsharded parameters":
                tracked.memory_class = "gathered outputs"

    def held(self) -> Bytes:
        """Returns the bytes that are allocated now, by class."""
        by_class: Counter[MemoryClass] = Counter()
        for tracked in list(self._live.values()):
            by_class[tracked.memory_class] += tracked.nbytes
        return {memory_class: nbytes for memory_class, nbytes in by_class.items() if nbytes}

    def at_peak(self) -> Bytes:
        """Returns the bytes that were allocated at the peak of the stage, by class."""
        total = peak = 0
        peak_at = 0
        for number, (_, change) in enumerate(self._log, 1):
            total += change
            if total > peak:
                peak, peak_at = total, number
        now: Counter[TrackedStorage] = Counter({tracked: tracked.nbytes for tracked in self._live.values()})
        for tracked, change in self._log[peak_at:]:
            now[tracked] -= change
        by_class: Counter[MemoryClass] = Counter()
        for tracked, nbytes in now.items():
            by_class[tracked.memory_class] += nbytes
        return {memory_class: nbytes for memory_class, nbytes in by_class.items() if nbytes}

    def _see(self, storage: torch.UntypedStorage, maker: CodeType | None) -> None:
        """Records a new storage, or the changed size of a known one."""
        if storage.device != self._device:
            return
        tracked = self._live.get(id(storage))
        if tracked is None:
            made_in = self._class_in[maker] if maker is not None else None
            tracked = self._add(storage, made_in or self.otherwise)
            self._log.append((tracked, tracked.nbytes))
        elif (nbytes := count_device_bytes(storage)) != tracked.nbytes:
            self._log.append((tracked, nbytes - tracked.nbytes))
            tracked.nbytes = nbytes

    def _add(self, storage: torch.UntypedStorage, memory_class: MemoryClass) -> TrackedStorage:
        tracked = TrackedStorage(memory_class, count_device_bytes(storage))
        identity = id(storage)

        # It may be called by another thread: each of these is one step of the interpreter.
        def note_end(_: Any) -> None:
            self._live.pop(identity, None)
            self._log.append((tracked, -tracked.nbytes))
            tracked.reference = None

        tracked.reference = weakref.ref(storage, note_end)
        self._live[identity] = tracked
        return tracked

    def _note_gradients(self, arguments: tuple[Any, ...]) -> None:
        """Counts as gradients all activations that are passed to a gradient reduction."""
        for tensor in list_tensors(arguments):
            for storage in list_storages(tensor):
                tracked = self._live.get(id(storage))
                if tracked is not None and tracked.memory_class == "activations":
                    tracked.memory_class = "gradients"

    def _find_maker(self) -> CodeType | None:
        """Finds the innermost function of torch's FSDP or optimizers on the stack of this thread.

        The search goes outwards and ends at the nearest call of a module.
        """
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and (code := frame.f_code) is not private.MODULE_CALL:
            if code not in self._class_in:
                self._class_in[code] = _find_class(code)
            if self._class_in[code] is not None:
                return code
            frame = frame.f_back
        return None


def _find_class(code: CodeType) -> MemoryClass | None:
    if _OPTIMIZERS in code.co_filename:
        return "optimizer state"
    _, is_of_fsdp, file = code.co_filename.partition(_FSDP)
    return _MADE_BY.get(code.co_name) or _MADE_IN.get(file, "unexplained") if is_of_fsdp else None


_TRAINS: tuple[JobStage, ...] = ("first step", "trained", "trained again")


class Unwatched:
    """A stand-in for StageWatch that measures nothing."""

    def set_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Sets the model and the optimizer whose tensors are divided into classes from now on."""

    def measure_stage(self, stage: JobStage, method: str = "") -> contextlib.AbstractContextManager[None]:
        """Measures a ``with`` block as a stage; a block that raises gets no ledger. All ranks must enter the stage."""
        return contextlib.nullcontext()

    def count_outputs(self, result: Any) -> Any:
        """Wraps the result of an extraction so that its tensors count as outputs.

        The result is a mapping, or an iterator of (name, tensor) pairs.
        """
        return result

    def take(self) -> tuple[StageMemory, ...]:
        """Returns the ledgers of the stages since the last call of ``take``."""
        return ()


class StageWatch(Unwatched):
    """Measures the stages of one job on this rank's device.

    Raises CannotRun for a device whose memory torch does not count.
    """

    def __init__(self, job: str, rank: int, device: torch.device) -> None:
        self._job = job
        self._rank = rank
        self._counters = DeviceCounters(device)
        self._tracker = StorageTracker(device)
        self._owned: Callable[[], Iterator[tuple[MemoryClass, torch.Tensor]]] = lambda: iter(())
        self._ledgers: list[StageMemory] = []

    def set_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._owned = lambda: list_owned_tensors(model, optimizer)

        def set_classes(*_: object) -> None:
            self._tracker.set_classes(self._owned())

        # Between a backward and the next one's beginning nobody but the optimizer's step sees the gradients.
        optimizer.register_step_pre_hook(set_classes)
        optimizer.register_step_post_hook(set_classes)
        set_classes()

    @contextlib.contextmanager
    def measure_stage(self, stage: JobStage, method: str = "") -> Iterator[None]:
        gc.collect()
        self._counters.synchronize()
        self._tracker.set_classes(self._owned())
        self._counters.reset_peak()
        with self._tracker.track("activations" if stage in _TRAINS else "communication buffers"):
            yield
            self._counters.synchronize()
        counted = self._counters.read()
        owned = list(self._owned())
        self._tracker.set_classes(owned)
        workspaces = self._counters.free_workspaces()
        device = counted.make_device_memory(
            by_class=_add_workspaces(workspaces, self._tracker.held()),
            at_peak=_add_workspaces(workspaces, self._tracker.at_peak()),
        )
        host = count_host_memory(owned, self._counters.read_pinned_reserved())
        self._ledgers.append(
            StageMemory(job=self._job, stage=stage, method=method, rank=self._rank, device=device, host=host)
        )

    def count_outputs(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            return self._count_each(result)
        for value in result.values():
            self._set_output(value)
        return result

    def take(self) -> tuple[StageMemory, ...]:
        taken, self._ledgers = tuple(self._ledgers), []
        return taken

    def _count_each(self, pairs: Any) -> Iterator[Any]:
        for pair in pairs:
            self._set_output(pair[1])
            yield pair
            del pair

    def _set_output(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tracker.set_output(value)


def _add_workspaces(workspaces: int, by_class: Bytes) -> Bytes:
    return {**by_class, "activations": by_class.get("activations", 0) + workspaces} if workspaces else by_class
