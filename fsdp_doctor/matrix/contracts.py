"""What a path promises: of its own in the table of paths, of the user's by ``promises``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

PromisedForm = Literal["full", "sharded", "flat", "info", "optimizer"]
PromisedDevice = Literal["compute", "cpu", "parameter", "any"]
PromisedDtype = Literal["master", "compute", "any"]
PromisedRanks = Literal["all", "rank0"]
PromisedKeys = Literal["state_dict", "parameters"]
PromisedWeights = Literal["own", "merged", "adapter"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a path promises. ``case/verification.py`` holds every yielded tensor against it.

    form: ``full`` unsharded tensors; ``sharded`` DTensors or ShardedTensors whose local part is
        this rank's shard; ``flat`` FSDP1's flat shards, and full tensors in a shard group of one,
        which has none; ``info`` (shape, dtype) pairs and no data; ``optimizer`` unsharded optimizer
        state, named ``<parameter>.<state>``.
    device: ``compute`` the rank's accelerator; ``cpu``; ``parameter`` the device that the
        parameter itself reports when the path starts; ``any``.
    dtype: ``master`` the parameter's own dtype; ``compute`` FSDP's mixed-precision param dtype;
        ``any``: compared after the reference is cast to whatever dtype came.
    ranks: which ranks are given data.
    keys: ``state_dict`` every name of every parameter, tied ones too, and persistent buffers;
        ``parameters`` each parameter once, under its first name.
    weights: of a model with LoRA adapters, ``own`` its tensors as they are, under their own names;
        ``merged`` those of the model that peft was given, with the adapters added; ``adapter`` the
        adapter alone, named as in peft's files.
    """

    form: PromisedForm = "full"
    device: PromisedDevice = "compute"
    dtype: PromisedDtype = "master"
    ranks: PromisedRanks = "all"
    keys: PromisedKeys = "state_dict"
    weights: PromisedWeights = "own"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def promises(
    *,
    device: PromisedDevice = "compute",
    dtype: PromisedDtype = "master",
    ranks: PromisedRanks = "all",
    keys: PromisedKeys = "state_dict",
    weights: PromisedWeights = "own",
) -> Callable[[_Function], _Function]:
    """Declares what an extraction function of your own promises; see :class:`Contract`.

    Without it ``--path module:function`` is held to full tensors on the compute device, in the
    parameters' own dtype, under every name of the state dict, on every rank.

    Raises ValueError for a word that a contract does not have.
    """
    for value, words in (
        (device, PromisedDevice),
        (dtype, PromisedDtype),
        (ranks, PromisedRanks),
        (keys, PromisedKeys),
        (weights, PromisedWeights),
    ):
        if value not in get_args(words):
            raise ValueError(f"unknown value {value!r}; use one of {', '.join(get_args(words))}")

    def mark(function: _Function) -> _Function:
        function.contract = Contract(device=device, dtype=dtype, ranks=ranks, keys=keys, weights=weights)  # type: ignore[attr-defined]
        return function

    return mark
