"""Runs in the processes of the user's job on the emulated device: it, what frameworks need there, and its generator.

A framework saves the generators of the devices whose names it knows, and this is none of them. So here the state of the
device's generator goes with that of the CPU's: whoever saves the one and restores it gets both.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.frameworks import FRAMEWORKS, FrameworkName

# By the module after whose import a framework is shown the device: the framework whose shims do that.
_SHIMMED: dict[str, FrameworkName] = {
    "accelerate": "accelerate",
    "transformers.trainer": "trainer",
    "lightning": "lightning",
    "torchtitan.trainer": "torchtitan",
}


def prepare(record: str) -> None:
    """Registers the device, and makes each framework find it once that is imported. record: a directory of the run."""
    try:
        devices.load(RunDevice(type="emulated"), "emulated")
    except CannotRun as error:
        raise RuntimeError(str(error)) from None
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    _tie_generators(pathlib.Path(record).parent.parent / "generators" / os.environ["LOCAL_RANK"])
    sys.meta_path.insert(0, _AfterFrameworks())


def _tie_generators(directory: pathlib.Path) -> None:
    """Keeps the device's generator under the state of the CPU's, in files that the runs of one diagnosis share."""
    directory.mkdir(parents=True, exist_ok=True)
    read, restore = torch.get_rng_state, torch.set_rng_state
    device = torch.get_device_module("emulated")

    def find_file(state: torch.Tensor) -> pathlib.Path:
        return directory / hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()

    def get_rng_state() -> torch.Tensor:
        state = read()
        find_file(state).write_bytes(device.get_rng_state().numpy().tobytes())
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        restore(new_state)
        file = find_file(new_state)
        if file.exists():
            device.set_rng_state(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    torch.set_rng_state = torch.random.set_rng_state = set_rng_state


class _AfterFrameworks:
    """A finder that lets others find a framework, and makes it find the device when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _SHIMMED:
            return None
        framework = _SHIMMED.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        spec.loader.exec_module = _execute_then_shim(spec.loader.exec_module, framework)  # type: ignore
        return spec


def _execute_then_shim(execute: Callable[[ModuleType], None], framework: FrameworkName) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        from fsdp_doctor.frameworks.adapter import Shims
        from fsdp_doctor.frameworks.framework_worker import find_adapter

        execute(module)
        find_adapter(framework).prepare_emulated_device(Shims(FRAMEWORKS[framework]))

    return run
