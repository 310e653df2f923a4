"""Prepares the user's job for the emulated device: the frameworks in it, and the device's random number generator.

A framework saves only the generators of the devices that it knows, and no framework knows the emulated device. The
state of the device's generator is therefore appended to the state of the CPU's generator. A program that saves and
restores the state of the CPU's generator then saves and restores both.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice

# By the module after whose import a framework is shown the device: the framework whose shims do that.
_SHIMMED = {
    "accelerate": "accelerate",
    "transformers.trainer": "trainer",
    "lightning": "lightning",
    "torchtitan.trainer": "torchtitan",
}


def prepare() -> None:
    """Registers the emulated device, and makes each framework find the device after the framework is imported.

    Raises RuntimeError if the device cannot be built.
    """
    try:
        devices.load(RunDevice(type="emulated"), "emulated")
    except CannotRun as error:
        raise RuntimeError(str(error)) from None
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    _tie_generators()
    for module in [module for module in _SHIMMED if module in sys.modules]:
        _show_device(_SHIMMED.pop(module))
    sys.meta_path.insert(0, _AfterFrameworks())


def _tie_generators() -> None:
    """Makes torch's functions for the CPU's generator state save and restore the device's generator, too."""
    read, restore = torch.get_rng_state, torch.set_rng_state
    length, device = len(read()), torch.get_device_module("emulated")

    def get_rng_state() -> torch.Tensor:
        return torch.cat([read(), device.get_rng_state()])

    def set_rng_state(new_state: torch.Tensor) -> None:
        restore(new_state[:length])
        if len(new_state) > length:
            device.set_rng_state(new_state[length:].clone())

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    torch.set_rng_state = torch.random.set_rng_state = set_rng_state


class _AfterFrameworks:
    """An import hook: after the import of a framework's module, it makes the framework find the emulated device."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _SHIMMED:
            return None
        framework = _SHIMMED.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_shim(module: ModuleType) -> None:
            execute(module)
            _show_device(framework)

        spec.loader.exec_module = execute_then_shim  # type: ignore
        return spec


def _show_device(framework: str) -> None:
    """Patches the framework so that it finds the emulated device, in the same way as a probe of the framework."""
    from fsdp_doctor.frameworks.adapter import Shims
    from fsdp_doctor.frameworks.framework_worker import find_adapter
    from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix

    find_adapter(framework).prepare_emulated_device(Shims(framework, read_matrix(framework).shims))
