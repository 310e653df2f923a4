"""Names under which tensors are yielded: the model's, or the Hub's. A fused tensor has several names of the Hub."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from fsdp_doctor.weights.names.hub_names import HubNames
from fsdp_doctor.weights.names.views import TensorView
from fsdp_doctor.weights.transport.sources import TensorSpec


class OutputNames:
    """Names under which one call yields tensors.

    hub: the Hub's names; None to use the model's names.
    """

    def __init__(self, hub: HubNames | None = None) -> None:
        self._hub = hub
        self._parts: dict[tuple[str, ...], list[tuple[TensorSpec, TensorView | None]]] = {}

    def __str__(self) -> str:
        """Returns a text that is the same on ranks with the same names."""
        return f"names={self._hub.digest if self._hub is not None else 'model'}"

    def list_parts(self, spec: TensorSpec) -> list[tuple[TensorSpec, TensorView | None]]:
        """Lists the parts of a tensor that are yielded, each with its view; the view is None for the whole tensor."""
        if self._hub is None:
            return [(spec, None)]
        if spec.names not in self._parts:
            self._parts[spec.names] = [
                (_rename(spec, names, view), None if view.is_whole(spec.shape) else view)
                for names, view in self._hub.list_parts(spec.names)
            ]
        return self._parts[spec.names]

    def divide(self, tensors: Generator[tuple[TensorSpec, torch.Tensor]]) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        """Returns a generator of the parts of each tensor, as views of the tensor.

        With the model's names it returns ``tensors`` itself, because each additional generator costs the host a
        microsecond for each tensor.
        """
        return tensors if self._hub is None else self._divide(tensors)

    def _divide(
        self, tensors: Generator[tuple[TensorSpec, torch.Tensor]]
    ) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        with contextlib.closing(tensors):
            for spec, tensor in tensors:
                for part, view in self.list_parts(spec):
                    yield part, tensor if view is None else view.read(tensor)
                del tensor


def _rename(spec: TensorSpec, names: tuple[str, ...], view: TensorView) -> TensorSpec:
    shape = torch.Size(view.shape)
    return TensorSpec(names=names, shape=shape, numel=shape.numel(), dtype=spec.dtype)
