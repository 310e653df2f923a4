"""What a framework is given: a small model as it is before anything wraps it, and the batches to train it on."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import models
from fsdp_doctor.case.lora_reference import is_adapter
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Dims, Model

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
    """One of the doctor's models, by its name on the axis ``model`` of a framework.

    weights: ``own``, or ``other`` for a session that is to load those of another.
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

    def module(self) -> nn.Module:
        """A new one: float32, on the CPU, in training mode; with peft's adapters where the model has any."""
        if self.has_adapters:
            # Whoever resumes starts from the same frozen model, with new adapters.
            return _with_adapters_of(self._build("own"), self._build(self.weights))
        return self._build(self.weights)

    def without_adapters(self) -> nn.Module:
        """The same as it was before peft's adapters were put on, for a framework that puts them on itself."""
        return models.build(*_MODEL["qwen3"], None, "own") if self.has_adapters else self._build(self.weights)

    def pretrained(self) -> pathlib.Path:
        """The directory of :meth:`without_adapters` as Hugging Face has it, of this rank's own.

        ``save_pretrained`` would write it on one rank of several alone.
        """
        from safetensors.torch import save_model

        directory = self.workspace / f"pretrained-{self.weights}-{self.place.rank}"
        if not directory.exists():
            directory.mkdir()
            module: Any = self.without_adapters()
            module.config.architectures = [type(module).__name__]
            module.config.to_json_file(directory / "config.json")
            save_model(module, str(directory / "model.safetensors"), metadata={"format": "pt"})
        return directory

    def with_buffers(self, module: nn.Module) -> nn.Module:
        """For a module that the framework made of :meth:`pretrained`: its buffers, which are in no class."""
        if self.name == "buffers":
            models.add_buffers(module, models.SEED[self.weights])
        return module

    def batch(self, number: int) -> torch.Tensor:
        """The tokens of that training step on this rank: int64, (2, 16), on the CPU."""
        seed = 1000 * self.place.rank + number
        return torch.randint(0, self._vocabulary_size, _BATCH, generator=torch.Generator().manual_seed(seed))

    def sequences(self, count: int) -> torch.Tensor:
        """For a framework that reads a data set itself, the same on every rank: int64, (count, 16), on the CPU."""
        shape = (count, _BATCH[1])
        return torch.randint(0, self._vocabulary_size, shape, generator=torch.Generator().manual_seed(0))

    @functools.cached_property
    def _vocabulary_size(self) -> int:
        return models.vocabulary_size(self._build(self.weights))

    def _build(self, weights: models.Weights) -> nn.Module:
        return models.build(*_MODEL[self.name], None, weights)


def _with_adapters_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """``model`` with the adapters' weights of ``other``."""
    adapters = {name: values for name, values in other.state_dict().items() if is_adapter(name)}
    model.load_state_dict(adapters, strict=False)
    return model
