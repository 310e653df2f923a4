"""Adapter for Megatron-FSDP, the PyPI package megatron-fsdp, without Megatron-LM: its ``fully_shard``, and DCP.

PYTHONPATH=examples/adapters/megatron_fsdp fsdp-doctor probe --framework megatron_fsdp_adapter:ADAPTER
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles, Shims

_PREFIX = "module."


class MegatronSession(FrameworkSession):
    """A model in MegatronFSDP. ``model`` is the module in it, so that its names are the plain model's."""

    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        self._use = configuration["use"]
        from megatron_fsdp import fully_shard
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

        if not dist.is_initialized():
            dist.init_process_group(f"cpu:gloo,{_name_backend(plain.device)}")
        module = plain.build_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self._wrapped, self.optimizer = fully_shard(
            module,
            optimizer,
            fsdp_unit_modules=[Qwen3DecoderLayer],
            zero_dp_strategy=configuration["sharding"],
            device=plain.device,
        )
        self.model = self._wrapped.module
        self._state_parts()

    def _state_parts(self) -> None:
        """States where this rank's part of each parameter lies: the placements, Shard(0), do not say it.

        The statement is the one that ``state_dict()`` makes on its own tensors, for distributed checkpoints.
        """
        from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

        for parameter in self.model.parameters():
            if not all(placement.is_replicate() for placement in parameter.placements):
                update_uneven_dtensor_chunk_metadata(parameter)

    def step(self, tokens: torch.Tensor) -> None:
        batch = tokens.to(self.plain.device)
        self._wrapped(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        if self._use == "clip_grad_norm":
            torch.nn.utils.clip_grad_norm_(self._wrapped.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: pathlib.Path) -> None:
        dcp.save(self._make_state(), checkpoint_id=directory)

    def load(self, directory: pathlib.Path) -> None:
        if self._use == "evaluated":
            with torch.no_grad():
                self._wrapped(input_ids=self.plain.make_batch(0).to(self.plain.device), use_cache=False)
        state = self._make_state()
        dcp.load(state, checkpoint_id=directory)
        if self._use == "get_state_dict":
            weights, moments = state["model"], state["optimizer"]
            set_state_dict(self._wrapped, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
            return
        self._wrapped.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    def _make_state(self) -> dict[str, Any]:
        if self._use == "get_state_dict":
            weights, moments = get_state_dict(self._wrapped, self.optimizer)
            return {"model": weights, "optimizer": moments}
        return {"model": self._wrapped.state_dict(), "optimizer": self.optimizer.state_dict()}

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {
            "state_dict": lambda directory: self._read_state_dict(),
            "state_dict.module": lambda directory: self.model.state_dict(),
            "state_dict.full_tensor": self._gather_by_torch,
            "state_dict.to_full_tensor": self._gather_by_megatron,
            "get_model_state_dict": self._get_model_state_dict,
            "dcp.save": self._save_weights,
            "dcp.save.module": self._save_weights_of_module,
        }

    def _read_state_dict(self) -> dict[str, torch.Tensor]:
        return _strip(self._wrapped.state_dict())

    def _gather_by_torch(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        values = self._read_state_dict()
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}

    def _gather_by_megatron(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor

        values = self._read_state_dict()
        return {
            name: uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value
            for name, value in values.items()
        }

    def _get_model_state_dict(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        return _strip(get_model_state_dict(self._wrapped, options=StateDictOptions(full_state_dict=True)))

    def _save_weights(self, directory: pathlib.Path) -> SavedFiles:
        self.save(directory)
        return SavedFiles(directory=directory, format="dcp", part=("model",), renamed=_strip_name)

    def _save_weights_of_module(self, directory: pathlib.Path) -> SavedFiles:
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=directory)
        return SavedFiles(directory=directory, format="dcp", part=("model",))


def _name_backend(device: torch.device) -> str:
    return f"{device.type}:{dist.get_default_backend_for_device(device)}"


def _strip(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {_strip_name(name): value for name, value in state.items()}


def _strip_name(name: str) -> str:
    return name.removeprefix(_PREFIX)


class MegatronAdapter(Adapter):
    # Not megatron_fsdp itself: on the emulated device its modules are loaded in the worker, with other names in them.
    modules = ("transformers.models.qwen3.modeling_qwen3",)

    def prepare_emulated_device(self, shims: Shims) -> None:
        from fsdp_doctor.emulated import in_place_of_cuda

        in_place_of_cuda.install(lambda name, file: f"{name}.".startswith("megatron_fsdp."))
        shims.note("megatron_fsdp")

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return MegatronSession(configuration, plain)


ADAPTER = MegatronAdapter()
