"""The interface of an adapter: how a framework's own code builds, trains, offloads, saves, loads and extracts.

An adapter is an instance of :class:`Adapter` in a module of ``fsdp_doctor.frameworks`` or of any other package. A TOML
table with the module's name lies in the same directory. The module imports its framework only inside functions, and
uses only the framework's public names, as users do. If a line of the adapter itself raises AttributeError, ImportError
or TypeError, the case is reported as ``unsupported`` with the framework's version, never as a failure of the framework.
"""

from __future__ import annotations

import abc
import functools
import importlib
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.case import models
from fsdp_doctor.case.lora_reference import is_adapter
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Dims, Model
from fsdp_doctor.matrix.frameworks.framework_matrix import Shim, StateDictType

FileFormat: TypeAlias = Literal["safetensors", "torch.save", "dcp"]
# The number of training steps before a session is examined, offloaded and saved.
STEPS_BEFORE = 2


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """The files that an extraction wrote. Every rank reads them.

    directory: the directory of ``*.safetensors`` files, of files of ``torch.save`` (``*.bin``, ``*.pt``), or of a
        distributed checkpoint.
    part: the keys that lead to the weights in a nested checkpoint, for example ``("model",)``.
    renamed: maps a saved name to the plain model's name, or to None for an entry that is not a weight.
    """

    directory: pathlib.Path
    format: FileFormat
    part: tuple[str, ...] = ()
    renamed: Callable[[str], str | None] = lambda name: name


Extracted: TypeAlias = SavedFiles | Mapping[str, Any] | Iterable[tuple[str, Any]]
Extractor: TypeAlias = Callable[[pathlib.Path], Extracted]


class FrameworkSession(abc.ABC):
    """A model wrapped by the framework's own code, with its optimizer.

    Every rank must call the same methods in the same order. A framework that is driven step by step implements
    :meth:`step`, :meth:`save` and :meth:`load`. A framework that owns its training loop overrides :meth:`train` and
    :meth:`save`, and sets ``goes_on`` to False.

    model: the wrapped model, which contains FSDP's root. It must be set before :meth:`train` calls ``at(0)``.
    optimizer: torch's optimizer, without the framework's wrapper. It must be set before :meth:`train` calls ``at(0)``.
    goes_on: whether :meth:`train` can be called again, to train further.
    shards_on: the device on which the configuration promises the shards between two steps; None if it promises nothing.
    state_dict_type: the type of state dicts that the framework reports; None if it reports none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    goes_on: ClassVar[bool] = True
    shards_on: torch.device | None = None
    state_dict_type: StateDictType | None = None

    def __init__(self, plain: PlainModel) -> None:
        self.plain = plain
        self.num_steps = 0

    def step(self, tokens: torch.Tensor) -> None:
        """Trains on a batch of this rank: int64, (2, 16), on the CPU."""
        raise NotImplementedError

    def offload(self) -> None:  # noqa: B027, most have none
        """Runs the framework's manual offload after a training step, if the configuration has one."""

    def onload(self) -> None:  # noqa: B027, as above
        """Undoes :meth:`offload` before the next training step."""

    def save(self, directory: pathlib.Path) -> None:
        """Saves a checkpoint for a resume, or begins to save. All files must be complete after the next training step.

        The directory does not exist yet.
        """
        raise NotImplementedError

    def load(self, directory: pathlib.Path) -> None:
        """Loads a checkpoint that :meth:`save` of this or another session wrote."""
        raise NotImplementedError

    @abc.abstractmethod
    def list_extractions(self) -> Mapping[str, Extractor]:
        """Returns each extraction under the name of its method.

        An extraction is called with a directory for its files, which does not exist yet.
        """

    def train(self, num_steps: int, at: Callable[[int], None], resume_from: pathlib.Path | None = None) -> None:
        """Trains ``num_steps`` more steps. Calls ``at(0)`` before the first step, and ``at(n)`` after the nth step.

        Exceptions that ``at`` raises are not caught.

        resume_from: the directory that :meth:`save` of another session wrote after its first STEPS_BEFORE steps. The
            checkpoint is loaded before ``at(0)``, and training continues with the batches that followed in the other
            session.
        """
        if resume_from is not None:
            self.load(resume_from)
            self.num_steps = STEPS_BEFORE
        at(0)
        for done in range(1, num_steps + 1):
            self.step(self.plain.make_batch(self.num_steps))
            self.num_steps += 1
            at(done)


class Adapter(abc.ABC):
    """The adapter of one installed framework.

    modules: the modules that a session imports.
    """

    modules: ClassVar[tuple[str, ...]] = ()

    def preload(self) -> None:
        """Imports ``modules`` in the process from which workers are forked. No thread may be left running."""
        for name in self.modules:
            importlib.import_module(name)

    def prepare_emulated_device(self, shims: Shims) -> None:  # noqa: B027, some need nothing
        """Makes the framework find the emulated device. Called in a worker, and only for the emulated device.

        Must make exactly the changes that the table lists under ``shims``.
        """

    @abc.abstractmethod
    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        """Configures the framework, which makes the process groups itself, and lets it wrap the plain model.

        Called in a separate worker for each configuration.

        configuration: the value of each of the framework's axes.
        """


_BATCH = (2, 16)
_MODEL: Mapping[str, tuple[Model, Dims]] = {
    "qwen3": (Model.QWEN3, Dims.EVEN),
    "uneven": (Model.QWEN3, Dims.UNEVEN),
    "tied": (Model.QWEN3_TIED, Dims.EVEN),
    "buffers": (Model.QWEN3_BUFFERS, Dims.EVEN),
    "lora": (Model.QWEN3_LORA, Dims.EVEN),
}


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """A small model that a framework is given to wrap, and the batches to train it on.

    name: the value of the framework's axis ``model``.
    weights: ``own``, or ``other`` for a session that is to load the weights of another session.
    workspace: a directory that the session may write to, the same on every rank.
    """

    name: str
    weights: models.Weights
    device: torch.device
    place: Place
    workspace: pathlib.Path

    @property
    def has_adapters(self) -> bool:
        return self.name == "lora"

    def build_module(self) -> nn.Module:
        """Builds the model in float32, on the CPU, in training mode, with peft's adapters if it has any."""
        module = self._build(self.weights)
        if not self.has_adapters or self.weights == "own":
            return module
        # A run that resumes starts from the same frozen weights, with new adapters.
        adapters = {name: values for name, values in module.state_dict().items() if is_adapter(name)}
        module = self._build("own")
        module.load_state_dict(adapters, strict=False)
        return module

    def build_without_adapters(self) -> nn.Module:
        """Builds the model without peft's adapters, for a framework that adds them itself."""
        return models.build(*_MODEL["qwen3"], None, "own") if self.has_adapters else self._build(self.weights)

    def write_pretrained(self) -> pathlib.Path:
        """Writes the model without adapters to a Hugging Face directory of this rank, and returns the directory.

        Does not use ``save_pretrained``, because only one rank would write. Like ``save_pretrained``, writes a tied
        weight once, under its first name: transformers 4.57 leaves a model on the meta device if its file has only the
        other name.
        """
        from safetensors.torch import save_file

        directory = self.workspace / f"pretrained-{self.weights}-{self.place.rank}"
        if not directory.exists():
            directory.mkdir()
            module: Any = self.build_without_adapters()
            module.config.architectures = [type(module).__name__]
            module.config.to_json_file(directory / "config.json")
            names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            second_names = names - dict(module.named_parameters()).keys()
            kept = {name: each for name, each in module.state_dict().items() if name not in second_names}
            save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def add_buffers(self, module: nn.Module) -> nn.Module:
        """Adds the model's extra buffers to a module that the framework read from disk.

        No class of transformers declares these buffers.
        """
        if self.name == "buffers":
            models.add_buffers(module, models.SEED[self.weights])
        return module

    def make_batch(self, number: int) -> torch.Tensor:
        """Returns the tokens of a training step on this rank: int64, (2, 16), on the CPU."""
        return self._draw_tokens(_BATCH, seed=1000 * self.place.rank + number)

    def make_sequences(self, count: int) -> torch.Tensor:
        """Returns a data set for a framework that reads one, the same on every rank: int64, (count, 16), on the CPU."""
        return self._draw_tokens((count, _BATCH[1]), seed=0)

    def _draw_tokens(self, shape: tuple[int, int], seed: int) -> torch.Tensor:
        return torch.randint(0, self._vocabulary_size, shape, generator=torch.Generator().manual_seed(seed))

    @functools.cached_property
    def _vocabulary_size(self) -> int:
        return models.read_vocabulary_size(self._build(self.weights))

    def _build(self, weights: models.Weights) -> nn.Module:
        return models.build(*_MODEL[self.name], None, weights)


class NotInStandInError(AttributeError):
    """Error for a framework that uses a name which fsdp-doctor's stand-in for an object does not have."""


class StandIn(types.SimpleNamespace):
    """Replaces an object of ``kind``, for example vLLM's client.

    Use of a name that the stand-in lacks makes the case unsupported.
    """

    def __init__(self, kind: str, **names: Any) -> None:
        super().__init__(**names)
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise NotInStandInError(f"the doctor's stand-in for {self._kind} has no {name}")


class Shims:
    """Makes the changes that a framework's table lists as shims. Each change is made by its name in the table."""

    def __init__(self, framework: str, shims: Iterable[Shim]) -> None:
        self._framework = framework
        self._missing = {shim.name for shim in shims}

    def replace(self, name: str, value: Any) -> Any:
        """Replaces ``module:qualified.name`` by ``value``, and returns the former value.

        Raises AttributeError or ImportError if the name does not exist.
        """
        self.note(name)
        module, _, qualified = name.partition(":")
        *owners, last = qualified.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        before = getattr(owner, last)
        setattr(owner, last, value)
        return before

    def set_variable(self, name: str, value: str) -> None:
        self.note(name)
        os.environ[name] = value

    def note(self, name: str) -> None:
        """Marks a shim as made. Used for changes that the adapter makes itself, such as a plug-in or a stand-in."""
        if name not in self._missing:
            raise AssertionError(f"{self._framework}: its table does not list {name} as a shim")
        self._missing.remove(name)

    def translate_backend(self) -> None:
        """Makes process groups use the emulated device's backend where the framework asks for nccl."""
        original = dist.init_process_group

        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
            # DeviceMesh splits a group that is bound to a device, and the emulated backend cannot be split.
            kwargs.pop("device_id", None)
            if isinstance(backend, str):
                backend = backend.replace("cuda:nccl", "emulated:emulated").replace("nccl", "emulated")
            return original(backend, *args, **kwargs)

        self.replace("torch.distributed:init_process_group", init_process_group)
        dist.distributed_c10d.init_process_group = init_process_group

    def check_complete(self) -> None:
        """Raises AssertionError if a change that the table lists was not made."""
        if self._missing:
            raise AssertionError(
                f"{self._framework}: these shims of its table were not made: {', '.join(sorted(self._missing))}"
            )
