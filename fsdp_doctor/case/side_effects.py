"""Undoes a method's changes to the process outside of its model, or reports that no other case may run in the process.

A changed setting on which a training step depends decides the verdict on a method that extracts: the setting belongs
to the whole job, even if the small models here do not use it. A case is judged while all changes of its method are in
place.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

# Limit for descriptors that all methods together may leave open in the life of a process.
_DESCRIPTORS_ALLOWED = 64
_THREADS_END_SECONDS = 0.5
_UNREADABLE = object()
# Modules and classes in which other code replaces torch's functions.
_OF_TORCH: tuple[Any, ...] = (torch, torch.Tensor, nn.Module, dist, distributed_c10d, DTensor)
_ABSENT = object()


@functools.cache
def read_torch_functions() -> TorchFunctions:
    """Returns the torch functions of this process. It must be called before any code of the user runs."""
    return TorchFunctions()


class TorchFunctions:
    """Original torch functions and methods that the doctor uses, as they were when this object was made."""

    def __init__(self) -> None:
        self._original = _take_snapshots()
        self._replacements: list[tuple[Any, str, Any]] = []

    def restore(self) -> None:
        """Restores torch's functions for the duration of the doctor's own work."""
        patched = list(_find_differing(self._original))
        self._replacements += [(place, name, vars(place).get(name, _ABSENT)) for place, name, _ in patched]
        _put(patched)

    def reapply(self) -> None:
        """Puts the method's replacements back."""
        _put(self._replacements)
        self._replacements = []


class _Snapshot:
    """Functions of a module or class of torch, kept for a cheap comparison with the functions at a later time."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._functions = {name: value for name, value in vars(place).items() if _is_function(value)}
        self._all = list(vars(place).values())

    def find_differing(self) -> Iterator[tuple[Any, str, Any]]:
        """Yields (module or class, name, earlier value) of every function that has changed."""
        now, before = vars(self._place), self._functions
        if len(now) == len(self._all) and all(map(operator.is_, now.values(), self._all)):
            return
        changed = [(name, value) for name, value in before.items() if now.get(name, _ABSENT) is not value]
        changed += [(name, _ABSENT) for name, value in now.items() if name not in before and _is_function(value)]
        if not changed:
            # The rest is state of torch's own, such as the number of groups.
            self._all = list(now.values())
        yield from ((self._place, name, value) for name, value in changed)


def _take_snapshots() -> list[_Snapshot]:
    return [_Snapshot(place) for place in _OF_TORCH]


class _LastSnapshots:
    """Snapshots of torch's functions. They are taken again only if a function has changed since the last time."""

    def __init__(self) -> None:
        self._last = _take_snapshots()

    def read(self) -> list[_Snapshot]:
        if next(_find_differing(self._last), None) is not None:
            self._last = _take_snapshots()
        return self._last


def _find_differing(before: list[_Snapshot]) -> Iterator[tuple[Any, str, Any]]:
    return itertools.chain.from_iterable(snapshot.find_differing() for snapshot in before)


def _is_function(value: Any) -> bool:
    """Returns whether the value is a function, a class or a property."""
    # isinstance() asks the value for its class, which makes torch.distributed.reduce_op warn.
    return callable(value) or issubclass(type(value), (property, classmethod, staticmethod))


def _put(values: Iterable[tuple[Any, str, Any]]) -> None:
    for place, name, value in values:
        if value is _ABSENT:
            delattr(place, name)
        else:
            setattr(place, name, value)


class SideEffects:
    """Compares the state of the process with its state before a method was called."""

    def __init__(self, device: torch.device) -> None:
        self._settings = list(_list_settings(device))
        self._before: list[Any] = []
        self._threads: set[threading.Thread] = set()
        self._num_descriptors = 0
        self._num_leaked_descriptors = 0

    def look_before(self) -> None:
        """Records the state of the process; call it just before the method is called."""
        self._before = [setting.read_value() for setting in self._settings]
        self._threads = set(threading.enumerate())
        self._num_descriptors = _count_open_descriptors()

    def list_changed(self) -> list[str]:
        """Lists the settings on which a training step depends and that have changed since :meth:`look_before`."""
        return [
            setting.name
            for setting, before in zip(self._settings, self._before, strict=True)
            if setting.trains and setting.is_changed(before)
        ]

    def undo(self) -> str:
        """Undoes the changes since :meth:`look_before`, and describes the changes that cannot be undone; empty if there
        are none.

        Does nothing in a case whose method was not called.
        """
        if not self._before:
            return ""
        left = [s.name for s, before in zip(self._settings, self._before, strict=True) if not s.put_back(before)]
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        end = time.monotonic() + _THREADS_END_SECONDS
        for thread in new:
            # Those of a pool that was released end by themselves.
            thread.join(max(0.0, end - time.monotonic()))
        left += [f"the thread {thread.name}" for thread in new if thread.is_alive()]
        self._num_leaked_descriptors += max(0, _count_open_descriptors() - self._num_descriptors)
        if self._num_leaked_descriptors > _DESCRIPTORS_ALLOWED:
            left.append(f"{self._num_leaked_descriptors} open descriptors")
        self._before = []
        return ", ".join(left)


@dataclass(frozen=True)
class _Setting:
    """Setting of the process.

    write: the function that sets it; None if it cannot be set back.
    trains: whether a training step depends on it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    same: Callable[[Any, Any], bool] = operator.eq
    trains: bool = False

    def read_value(self) -> Any:
        try:
            return self.read()
        except Exception:
            return _UNREADABLE

    def is_changed(self, before: Any) -> bool:
        """Returns whether the value differs from ``before``, which :meth:`read_value` returned."""
        now = self.read_value()
        return before is not _UNREADABLE and (now is _UNREADABLE or not self.same(now, before))

    def put_back(self, before: Any) -> bool:
        """Restores ``before``; returns whether the setting has this value afterwards."""
        if before is _UNREADABLE:
            return True
        try:
            if not self.same(self.read(), before) and self.write is not None:
                self.write(before)
            return self.same(self.read(), before)
        except Exception:
            return False


def _list_settings(device: torch.device) -> Iterator[_Setting]:
    """Lists the settings in the order in which they are restored, beginning with those that affect how tensors are
    made.
    """
    yield _Setting(
        "torch's functions",
        _LastSnapshots().read,
        lambda before: _put(list(_find_differing(before))),
        lambda _, before: next(_find_differing(before), None) is None,
    )
    yield _Setting("the default process group", lambda: dist.group.WORLD, None, operator.is_)
    yield _Setting("inference mode", torch.is_inference_mode_enabled, None, trains=True)
    yield _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, trains=True)
    yield _Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype, trains=True)
    yield _Setting(
        "the default device",
        torch.get_default_device,
        # None and not "cpu", which would put a mode that every factory function goes through in place of none.
        lambda before: torch.set_default_device(None if before.type == "cpu" else before),
        trains=True,
    )
    yield _Setting(
        "deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, trains=True
    )
    for device_type in dict.fromkeys(("cpu", device.type)):
        yield _read_autocast(device_type)
    yield _Setting("autocast", _read_autocast_nesting, _set_autocast_nesting, trains=True)
    yield _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads)
    yield _Setting("torch's random numbers", torch.get_rng_state, torch.set_rng_state, torch.equal, trains=True)
    yield _Setting("Python's random numbers", random.getstate, random.setstate)
    if "numpy" in sys.modules:
        numbers = sys.modules["numpy"].random
        yield _Setting(
            "numpy's random numbers",
            lambda: pickle.dumps(numbers.get_state()),
            lambda state: numbers.set_state(pickle.loads(state)),
        )
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield _Setting(
            "the device's random numbers",
            lambda: module.get_rng_state(device),
            lambda state: module.set_rng_state(state, device),
            torch.equal,
            trains=True,
        )
        yield _Setting("the current stream", lambda: module.current_stream(device), module.set_stream, trains=True)
        yield _Setting("the current device", module.current_device, module.set_device, trains=True)
    yield _Setting("the working directory", os.getcwd, os.chdir)
    yield _Setting("the environment", lambda: dict(os.environ), _set_environment)
    yield _Setting("signal handlers", _read_signal_handlers, _set_signal_handlers)
    yield _Setting(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda before: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )
    yield _Setting(
        "a timer",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda _: signal.setitimer(signal.ITIMER_REAL, 0),
    )
    yield _Setting("garbage collection", gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable())
    yield _Setting("standard streams", lambda: [os.readlink(f"/proc/self/fd/{number}") for number in range(3)], None)


def _read_autocast(device_type: str) -> _Setting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def write(before: tuple[bool, torch.dtype]) -> None:
        enabled, dtype = before
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)

    return _Setting(f"autocast of {device_type}", read, write, trains=True)


def _read_autocast_nesting() -> tuple[int, bool]:
    """Returns (the number of open autocast contexts, whether casts are cached)."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting(), torch.is_autocast_cache_enabled()


def _set_autocast_nesting(before: tuple[int, bool]) -> None:
    depth, cache_enabled = before
    while _read_autocast_nesting()[0] > depth:
        torch.autocast_decrement_nesting()
    while _read_autocast_nesting()[0] < depth:
        torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(cache_enabled)
    torch.clear_autocast_cache()


def _set_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _read_signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler and number not in _OF_FAULTHANDLER:
            signal.signal(number, handler)


# Signals whose handlers in a worker are faulthandler's, which Python cannot restore: they stay as the method left them.
_OF_FAULTHANDLER = (signal.SIGUSR1, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)


def _count_open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        # There is none left to list them with.
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
