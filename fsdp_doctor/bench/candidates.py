"""What is compared: each path takes the sharded model to full tensors, and lets go of each at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.bench.request import PATHS
from fsdp_doctor.case.offloading import load
from fsdp_doctor.case.paths import on_fsdp1, on_fsdp2
from fsdp_doctor.case.paths.lookup import load_user_path
from fsdp_doctor.extract import BUCKET_BYTES, full_state_dict, full_tensors
from fsdp_doctor.matrix.paths import is_user_path

# The arguments that a path can ask for: nothing is trained here.
_GIVEN = ("model", "device")


@dataclass(frozen=True)
class Row:
    """One path.

    offloads: under which it is measured; of the others it is known that they break it. to_host: it ends in
    host memory, to which no ceiling is set. moves_model: what it leaves on the device has to be moved back.
    bucket_bytes: the size that it was given, None for the default.
    """

    name: str
    function: Callable[..., Any]
    offloads: tuple[str, ...] = ("none", "param", "policy", "policy-unpinned")
    to_host: bool = False
    moves_model: bool = False
    bucket_bytes: int | None = None


def rows(
    strategy: str, chosen: Sequence[str], *, dtype: torch.dtype | None, bucket_bytes: Sequence[int | None]
) -> list[Row]:
    """Those of the named ones that the strategy has, or all of them; ours once for each size of a bucket."""
    known = {row.name: [row] for row in (_FSDP2 if strategy == "fsdp2" else _FSDP1)}
    known["full_tensors"] = [_ours("full_tensors", full_tensors, dtype, nbytes) for nbytes in bucket_bytes]
    known["full_state_dict"] = [
        _ours("full_state_dict", full_state_dict, dtype, nbytes, to_host=True) for nbytes in bucket_bytes
    ]
    found: list[Row] = []
    for name in chosen or PATHS[strategy]:
        found += [Row(name, users_function(name))] if is_user_path(name) else known.get(name, [])
    return found


def _ours(
    name: str, function: Callable[..., Any], dtype: torch.dtype | None, nbytes: int | None, *, to_host: bool = False
) -> Row:
    called = functools.partial(function, dtype=dtype, bucket_bytes=nbytes or BUCKET_BYTES)
    return Row(name, called, to_host=to_host, bucket_bytes=nbytes)


def users_function(name: str) -> Callable[..., Any]:
    """``module:function`` of the user. Raises UsageError if it cannot be called with the model and the device."""
    return load_user_path(name, _GIVEN)[0]


def consume(result: Any, dtype: torch.dtype | None) -> None:
    """Goes through everything that a path gives, casts what it did not cast, and keeps no more than the last."""
    for _, value in result.items() if isinstance(result, Mapping) else result:
        if isinstance(value, torch.Tensor) and dtype is not None:
            value.to(dtype)


def _staged(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    """The whole model on the device, then every tensor; the way back is the caller's."""
    load(model, device, non_blocking=False)
    yield from on_fsdp2.state_dict_to_full_tensor(model, device)


_FSDP2 = (
    Row("state_dict.to.full_tensor", on_fsdp2.state_dict_to_full_tensor),
    Row("stage-whole-model", _staged, offloads=("param",), moves_model=True),
    Row("unshard", on_fsdp2.unshard, offloads=("none", "policy", "policy-unpinned")),
    Row("get_model_state_dict.full", on_fsdp2.model_state_dict_full),
    Row("get_model_state_dict.full+cpu", on_fsdp2.model_state_dict_full_cpu, to_host=True),
)
_FSDP1 = (
    Row("sharded_state_dict.full_tensor", on_fsdp1.sharded_state_dict_full_tensor, offloads=("none", "policy")),
    Row("summon_full_params", on_fsdp1.summon_full_params, offloads=("none", "policy")),
    Row("get_model_state_dict.full", on_fsdp2.model_state_dict_full, offloads=("none", "policy")),
    Row(
        "get_model_state_dict.full+cpu",
        on_fsdp2.model_state_dict_full_cpu,
        offloads=("none", "policy"),
        to_host=True,
    ),
)
