"""Non-persistent buffers: no checkpoint has them, so the caller must, where they are on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdp_doctor.errors import some
from fsdp_doctor.fsdp.reader import HeldTensor
from fsdp_doctor.load.given import check_value
from fsdp_doctor.load.materialization import become
from fsdp_doctor.load.outcome import LoadError


class TransientBuffers:
    """supplied: by name. device: where those on the meta device belong.

    Raises LoadError for one on the meta device that is not supplied, and for what fits none.
    """

    def __init__(self, held: Sequence[HeldTensor], supplied: Mapping[str, torch.Tensor], device: torch.device) -> None:
        by_name = {name: buffer for buffer in held for name in buffer.names}
        if unknown := [name for name in supplied if name not in by_name]:
            raise LoadError(f"buffers: the model has no non-persistent buffers of these names: {some(unknown)}")
        empty = [b.names[0] for b in held if b.tensor.is_meta and not supplied.keys() & set(b.names)]
        if empty:
            raise LoadError(
                f"{len(empty)} non-persistent buffers are on the meta device, and no checkpoint has them; "
                f"give them as buffers={{name: tensor}}: {some(empty)}"
            )
        for name, value in supplied.items():
            check_value(name, value)
            buffer = by_name[name].tensor
            if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                raise LoadError(
                    f"buffers: {name} is {list(value.shape)} of {value.dtype}, and {list(buffer.shape)} of "
                    f"{buffer.dtype} in the model"
                )
        given = ((by_name[name].tensor, value.detach()) for name, value in supplied.items())
        self._given = [(b, value.to(device, copy=True) if b.is_meta else value) for b, value in given]

    def fill(self) -> None:
        for buffer, value in self._given:
            if buffer.is_meta:
                become(buffer, value)
            else:
                buffer.copy_(value)
