"""Methods that deliver what they promise, and then leave one thing behind in the process, on every rank or on rank 1.

Each raises AssertionError if the one before it has left anything.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_doctor

Entries = Iterator[tuple[str, torch.Tensor]]
Method = Callable[[nn.Module], Entries]

_kept: list[Any] = []
_random_numbers: list[Any] = []
_DESCRIPTORS = 100


def _leaving(leave: Callable[[], object]) -> Method:
    def method(model: nn.Module) -> Entries:
        yield from looks(model)
        leave()

    return method


def _enter(context: Any) -> Callable[[], object]:
    def enter() -> None:
        _kept.append(context())
        _kept[-1].__enter__()

    return enter


def _on_rank_1(leave: Callable[[], object]) -> Callable[[], object]:
    return lambda: leave() if dist.get_rank() == 1 else None


def _draw_random_numbers() -> None:
    import numpy

    torch.manual_seed(12345)
    random.seed(12345)
    numpy.random.seed(12345)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(12345)


def _change_the_environment() -> None:
    os.environ["FSDP_DOCTOR_TEST_LEFTOVER"] = "1"
    del os.environ["PATH"]


def _start_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _change_another_stream() -> None:
    module = torch.get_device_module()
    module.set_stream(module.Stream())


def _change_the_device() -> None:
    module = torch.get_device_module()
    module.set_device((module.current_device() + 1) % module.device_count())


def _break_the_next_build() -> None:
    """Breaks the next build in a way that nobody can look for."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("left by another case")

    torch.optim.AdamW.__init__ = refuse  # type: ignore[method-assign]


grad_mode = _leaving(lambda: torch.set_grad_enabled(False))
grad_mode_on_rank_1 = _leaving(_on_rank_1(lambda: torch.set_grad_enabled(False)))
inference_mode = _leaving(_enter(torch.inference_mode))
default_dtype = _leaving(lambda: torch.set_default_dtype(torch.float64))
default_device = _leaving(lambda: torch.set_default_device("meta"))
deterministic_mode = _leaving(lambda: torch.use_deterministic_algorithms(True))
autocast = _leaving(_enter(lambda: torch.autocast("cpu", dtype=torch.bfloat16)))
random_numbers = _leaving(_draw_random_numbers)
working_directory = _leaving(lambda: os.chdir("/"))
environment = _leaving(_change_the_environment)
signal_handler = _leaving(lambda: signal.signal(signal.SIGCHLD, lambda *_: None))
signal_that_asks_for_the_stack = _leaving(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
blocked_signals = _leaving(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))
timer = _leaving(lambda: signal.setitimer(signal.ITIMER_REAL, 600))
garbage_collection = _leaving(gc.disable)
descriptors = _leaving(lambda: _kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(_DESCRIPTORS)))
closed_stdout = _leaving(lambda: os.close(1))
thread = _leaving(_start_a_thread)
thread_on_rank_1 = _leaving(_on_rank_1(_start_a_thread))
process_group = _leaving(dist.destroy_process_group)
next_build = _leaving(_break_the_next_build)
stream = _leaving(_change_another_stream)
device = _leaving(_change_the_device)


def looks(model: nn.Module) -> Entries:
    """Leaves nothing."""
    state = {
        "grad mode": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype() == torch.float32,
        "default device": torch.get_default_device().type == "cpu",
        "deterministic mode": not torch.are_deterministic_algorithms_enabled(),
        "autocast": not torch.is_autocast_enabled("cpu"),
        "autocast nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0),
        "working directory": os.getcwd() != "/",
        "environment": "PATH" in os.environ and "FSDP_DOCTOR_TEST_LEFTOVER" not in os.environ,
        "signal handler": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "signal that asks for the stack": signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN,
        "blocked signals": not signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timer": signal.getitimer(signal.ITIMER_REAL) == (0, 0),
        "garbage collection": gc.isenabled(),
        "descriptors": len(os.listdir("/proc/self/fd")) < _DESCRIPTORS,
        "stdout": os.path.exists("/proc/self/fd/1"),
        "threads": not any(thread.daemon for thread in threading.enumerate()),
        "process group": dist.is_initialized(),
        "random numbers": _random_numbers_go_on(),
    }
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        state["stream"] = module.current_stream() == module.default_stream()
        state["device"] = module.current_device() == int(os.environ["LOCAL_RANK"])
    left = [name for name, clean in state.items() if not clean]
    assert not left, left
    yield from fsdp_doctor.full_tensors(model)


def _random_numbers_go_on() -> bool:
    """Returns whether the generators stand where they did at the last look in this process."""
    import numpy

    state = [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]
    if torch.accelerator.is_available():
        state.append(torch.get_device_module().get_rng_state().tolist())
    if not _random_numbers:
        _random_numbers.extend(state)
    return _random_numbers == state


if os.environ.get("FSDP_DOCTOR_TEST_NOTHING_BUILDS") and "RANK" in os.environ:
    _break_the_next_build()
