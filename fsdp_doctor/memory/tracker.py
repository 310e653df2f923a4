"""Every storage that operators make on a device, from its making to its end, by class.

As ``torch.distributed._tools.mem_tracker`` does it, a dispatch mode sees the results of operators, and weak references
tell when their storages end. What is done otherwise: memory is real, not fake, and the sum is held against what the
allocator counts; what FSDP1, FSDP2 and optimizers make is known by the file of torch in which it is made, so that of
theirs nothing is patched and only the resizing of storages is; and the log of a stage is replayed when the stage is
over, so that a storage counts at the peak as what it became, such as a gradient, and not as what it was made as.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from fsdp_doctor.fsdp import private
from fsdp_doctor.ledgers.stage_ledger import Bytes, MemoryClass
from fsdp_doctor.memory.storages import device_bytes, is_wrapper, storages, tensors_in

_OPTIMIZERS = "/torch/optim/"
_FSDP = "/torch/distributed/fsdp/"
# What is made in a file of torch's FSDP is of this class; the innermost function decides, and of a file without a class
# the one that called it. In a file that is not among them it is unexplained: torch has changed since.
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
# What makes shards that are to be gathered, and what makes or moves the shards themselves.
_MADE_BY: dict[str, MemoryClass] = {
    "all_gather_inputs": "communication buffers",
    "_use_low_precision_shard": "communication buffers",
    "_init_sharded_param": "parameters",
    "reset_sharded_param": "parameters",
    "flat_param_to": "parameters",
}
# What is given the gradients of a unit, as the backward made them.
_REDUCES = ("foreach_reduce", "foreach_reduce_scatter_copy_in", "_post_backward_hook", "_reduce_grad")


class TrackedStorage:
    """One storage: its class so far, and the bytes that it has now.

    is_owned: whether its class is what its owner says, and not what its making suggests.
    """

    __slots__ = ("__weakref__", "is_owned", "memory_class", "nbytes", "reference")

    def __init__(self, memory_class: MemoryClass, nbytes: int) -> None:
        self.memory_class = memory_class
        self.is_owned = False
        self.nbytes = nbytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class StorageTracker(private.OperatorMode):
    """While it is entered, keeps account of the storages of one device.

    otherwise: the class of what is made where nothing says what it is.
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
        maker = self._maker()
        for tensor in tensors_in(result):
            for storage in storages(tensor):
                self._see(storage, maker)
        if maker is not None and maker.co_name in _REDUCES:
            self._note_gradients(args)
        return result

    @contextlib.contextmanager
    def tracking(self, otherwise: MemoryClass) -> Iterator[None]:
        """The operators of a stage, and the storages that FSDP gives memory to and takes it from.

        ``UntypedStorage.resize_`` is no operator.
        """
        self.otherwise = otherwise
        self._log = []
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._see(storage, self._maker())
            return result

        with self:
            torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def own(self, tensors: Iterable[tuple[MemoryClass, torch.Tensor]]) -> None:
        """Says of tensors what they are; the first that is said of a storage holds."""
        said: set[int] = set()
        for memory_class, tensor in tensors:
            for storage in storages(tensor):
                if storage.device == self._device and id(storage) not in said:
                    said.add(id(storage))
                    tracked = self._live.get(id(storage)) or self._add(storage, memory_class)
                    tracked.memory_class = memory_class
                    tracked.is_owned = True

    def yielded(self, tensor: torch.Tensor) -> None:
        """Says that a tensor is what a path yields, unless it is somebody's: a path may yield a parameter."""
        for storage in storages(tensor):
            tracked = self._live.get(id(storage))
            if tracked is not None and not tracked.is_owned and tracked.memory_class != "unsharded parameters":
                tracked.memory_class = "gathered outputs"

    def held(self) -> Bytes:
        """By class, what is alive now."""
        return _summed(tracked for tracked in list(self._live.values()) if tracked.nbytes)

    def at_peak(self) -> Bytes:
        """By class, what was alive when the most was, since the stage began."""
        total = peak = 0
        peak_at = 0
        for number, (_, change) in enumerate(self._log, 1):
            total += change
            if total > peak:
                peak, peak_at = total, number
        now: Counter[TrackedStorage] = Counter({tracked: tracked.nbytes for tracked in self._live.values()})
        for tracked, change in self._log[peak_at:]:
            now[tracked] -= change
        held: Counter[MemoryClass] = Counter()
        for tracked, nbytes in now.items():
            held[tracked.memory_class] += nbytes
        return {memory_class: nbytes for memory_class, nbytes in held.items() if nbytes}

    def _see(self, storage: torch.UntypedStorage, maker: CodeType | None) -> None:
        """A storage that is new, or may have been given another size."""
        if storage.device != self._device:
            return
        tracked = self._live.get(id(storage))
        if tracked is None:
            made_in = self._class_in[maker] if maker is not None else None
            tracked = self._add(storage, made_in or self.otherwise)
            self._log.append((tracked, tracked.nbytes))
        elif (nbytes := device_bytes(storage)) != tracked.nbytes:
            self._log.append((tracked, nbytes - tracked.nbytes))
            tracked.nbytes = nbytes

    def _add(self, storage: torch.UntypedStorage, memory_class: MemoryClass) -> TrackedStorage:
        tracked = TrackedStorage(memory_class, device_bytes(storage))
        identity = id(storage)

        # It may be called by another thread: each of these is one step of the interpreter.
        def ended(_: Any) -> None:
            self._live.pop(identity, None)
            self._log.append((tracked, -tracked.nbytes))
            tracked.reference = None

        tracked.reference = weakref.ref(storage, ended)
        self._live[identity] = tracked
        return tracked

    def _note_gradients(self, arguments: tuple[Any, ...]) -> None:
        """The backward that made them says of nothing what it is."""
        for tensor in tensors_in(arguments):
            for storage in storages(tensor):
                tracked = self._live.get(id(storage))
                if tracked is not None and tracked.memory_class == "activations":
                    tracked.memory_class = "gradients"

    def _maker(self) -> CodeType | None:
        """The innermost function of torch's FSDP or optimizers that this thread is in, if it calls no module."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and (code := frame.f_code) is not private.MODULE_CALL:
            if code not in self._class_in:
                self._class_in[code] = _class_of(code)
            if self._class_in[code] is not None:
                return code
            frame = frame.f_back
        return None


def _class_of(code: CodeType) -> MemoryClass | None:
    if _OPTIMIZERS in code.co_filename:
        return "optimizer state"
    _, is_of_fsdp, file = code.co_filename.partition(_FSDP)
    return _MADE_BY.get(code.co_name) or _MADE_IN.get(file, "unexplained") if is_of_fsdp else None


def _summed(tracked: Iterable[TrackedStorage]) -> Bytes:
    held: Counter[MemoryClass] = Counter()
    for one in tracked:
        held[one.memory_class] += one.nbytes
    return dict(held)
