"""What an adapter of a framework is: how its own code builds, trains, offloads, saves, loads and extracts.

An adapter is a module of this room with a class of :class:`Adapter`, named ``ADAPTER``. It imports its framework inside
of functions alone, and uses the framework's public names as its users do. What it does not know of an installed version
it leaves to raise: an AttributeError, ImportError or TypeError that the adapter's own lines raise is told as
``unsupported`` with the framework's version, never as a verdict.
"""

from __future__ import annotations

import abc
import importlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn

from fsdp_doctor.frameworks.plain_model import PlainModel
from fsdp_doctor.frameworks.shimming import Shimming
from fsdp_doctor.machine.versions import installed_versions
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix

FileFormat: TypeAlias = Literal["safetensors", "torch.save", "dcp"]
# After how many steps a run is looked at, offloaded and saved.
STEPS_BEFORE = 2


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """An extraction's result that lies in files; every rank reads them.

    directory: of ``*.safetensors`` files, of files of ``torch.save`` (``*.bin``, ``*.pt``), or of a distributed
        checkpoint. part: of a nested checkpoint the keys that lead to the weights, for example ``("model",)``.
    renamed: from a saved name to the plain model's, None for an entry that is no weight.
    """

    directory: pathlib.Path
    format: FileFormat
    part: tuple[str, ...] = ()
    renamed: Callable[[str], str | None] = lambda name: name


Extracted: TypeAlias = SavedFiles | Mapping[str, Any] | Iterable[tuple[str, Any]]
Extraction: TypeAlias = Callable[[pathlib.Path], Extracted]


class FrameworkSession(abc.ABC):
    """A model that the framework's own code wrapped, with its optimizer. Every rank calls every method alike.

    A framework that is driven step by step implements :meth:`step`, :meth:`save` and :meth:`load`. One that owns its
    loop overrides :meth:`train` and :meth:`save`, and sets ``goes_on`` to False.

    goes_on: whether :meth:`train` can be called again, to train further.
    shards_on: where the configuration promises the shards between two steps; None where it promises nothing.
    """

    goes_on: ClassVar[bool] = True
    shards_on: torch.device | None = None

    def __init__(self, plain: PlainModel) -> None:
        self.plain = plain
        self.num_steps = 0

    @property
    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The wrapped model, with FSDP's root in it."""

    @property
    @abc.abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer itself, without what the framework puts around it."""

    def step(self, tokens: torch.Tensor) -> None:
        """One training step of the framework's own on a batch of this rank: int64, (2, 16), on the CPU."""
        raise NotImplementedError

    def offload(self) -> None:  # noqa: B027, most have none
        """The framework's manual offload between a training step and an extraction, where the configuration has one."""

    def onload(self) -> None:  # noqa: B027, as above
        """Its counterpart before the next training step."""

    def save(self, directory: pathlib.Path) -> None:
        """Saves for a resume, at the latest before the next training step. The directory is not yet made."""
        raise NotImplementedError

    def load(self, directory: pathlib.Path) -> None:
        """Loads what :meth:`save` left there, in this session or in another."""
        raise NotImplementedError

    @abc.abstractmethod
    def extractions(self) -> Mapping[str, Extraction]:
        """By the name of its path, the call that extracts; it is given a directory, not yet made, for files."""

    def train(self, num_steps: int, at: Callable[[int], None], resume_from: pathlib.Path | None = None) -> None:
        """Trains that many steps more, and calls ``at(n)`` after the nth of them; ``at(0)`` before the first.

        resume_from: what :meth:`save` of another session left after its first STEPS_BEFORE steps: it is loaded before
            ``at(0)``, and training goes on with the batches that followed there. What ``at`` raises is passed on.
        """
        if resume_from is not None:
            self.load(resume_from)
            self.num_steps = STEPS_BEFORE
        at(0)
        for done in range(1, num_steps + 1):
            self.step(self.plain.batch(self.num_steps))
            self.num_steps += 1
            at(done)


class Adapter(abc.ABC):
    """One framework.

    matrix: what there is to try of it, which is read without this module. modules: what a session imports.
    """

    matrix: ClassVar[FrameworkMatrix]
    modules: ClassVar[tuple[str, ...]]

    def unavailable(self) -> str:
        """Why it cannot be run here; empty if it can. Imports nothing of the framework."""
        own = self.matrix.distributions[0]
        return "" if installed_versions([own]) else f"{own} is not installed"

    def preload(self) -> None:
        """Imports what a session needs, once, in the process that workers are forked from: no thread may stay."""
        for name in self.modules:
            importlib.import_module(name)

    def on_emulated(self, shims: Shimming) -> None:  # noqa: B027, some need nothing
        """Makes the framework find the emulated device, in a worker; never called for another device.

        Changes what ``matrix.shims`` lists, all of it and nothing else.
        """

    @abc.abstractmethod
    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        """Configures the framework, which makes the process groups itself, and has it wrap the plain model.

        configuration: the value of each of the framework's axes. Called in a worker of its own for each configuration.
        """
