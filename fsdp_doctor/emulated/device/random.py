"""``torch.emulated.random``, the counterpart of ``torch.cuda.random``, with a generator for each device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_doctor.emulated.device.index import NAME, Device, find_index
from fsdp_doctor.emulated.library import _C

__all__ = [
    *("get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_rng_state", "set_rng_state_all"),
]


def _find_generator(device: Device) -> torch.Generator:
    generator: torch.Generator = _C.default_generator(find_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _find_generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices."""
    for index in range(_C.device_count()):
        _find_generator(index).manual_seed(seed)


def seed() -> int:
    """Seeds the current device's generator from the system's randomness, and returns the seed."""
    return _find_generator(None).seed()


def initial_seed() -> int:
    """Returns the seed of the current device's generator."""
    return _find_generator(None).initial_seed()


def get_rng_state(device: Device = NAME) -> torch.Tensor:
    """Returns the generator's seed and offset in a CPU tensor of 16 bytes, like CUDA's."""
    return _find_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = NAME) -> None:
    """Restores a state that ``get_rng_state`` returned."""
    _find_generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Returns the generator's state of each device."""
    return [get_rng_state(index) for index in range(_C.device_count())]


def seed_all() -> None:
    """Seeds the generators of all devices with the same number from the system's randomness."""
    manual_seed_all(seed())


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Restores the states that ``get_rng_state_all`` returned."""
    for index, state in enumerate(states):
        set_rng_state(state, index)
