"""The adapters by name, and whether their frameworks can be imported here."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from fsdp_doctor.frameworks.adapter import Adapter
from fsdp_doctor.machine.versions import installed_versions
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName

_unavailable: dict[FrameworkName, str] = {}


def adapter_of(name: FrameworkName) -> Adapter:
    """The adapter; its framework is not imported yet."""
    adapter: Adapter = importlib.import_module(f"fsdp_doctor.frameworks.on_{name}").ADAPTER
    return adapter


def preload(name: FrameworkName, seconds: float) -> None:
    """Imports a framework, for the process that workers are forked from. What goes wrong, :func:`why_unavailable` says.

    What the import prints is dropped. seconds: that it may take.
    """
    _unavailable[name] = adapter_of(name).unavailable() or _import(adapter_of(name), seconds)


def why_unavailable(name: FrameworkName) -> str:
    """Why it cannot be run here, after :func:`preload`; empty if it can."""
    return _unavailable[name]


def in_words(adapter: Adapter) -> str:
    """The framework and its version."""
    own = adapter.matrix.distributions[0]
    return f"{own} {installed_versions([own]).get(own, '')}".strip()


def _import(adapter: Adapter, seconds: float) -> str:
    try:
        with _silenced(), _interrupted_after(seconds):
            adapter.preload()
    except BaseException as error:
        # SystemExit too: a framework that ends its importer is not to end the run.
        message = (str(error).strip().splitlines() or [""])[0]
        return f"{in_words(adapter)} cannot be imported: {type(error).__name__}: {message}".rstrip(": ")
    if torch.cuda.is_initialized():
        return f"{in_words(adapter)} initializes CUDA as it is imported, and no worker can be forked after that"
    return ""


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Nothing that is written to stdout or stderr, by Python or below it, comes out."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)
