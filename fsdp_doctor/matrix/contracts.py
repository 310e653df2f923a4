"""Contracts of methods. The table of methods declares the contracts of the matrix's methods, and a user declares a
contract with ``promises``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar, get_args

from typing_extensions import Unpack

PromisedForm = Literal["full", "sharded", "local", "flat", "info", "optimizer"]
PromisedDevice = Literal["compute", "cpu", "parameter", "any"]
PromisedDtype = Literal["master", "compute", "any"]
PromisedRanks = Literal["all", "rank0"]
PromisedKeys = Literal["state_dict", "parameters", "any name"]
PromisedWeights = Literal["own", "merged", "adapter"]
PromisedStreams = Literal["any", "one"]
Direction = Literal["out", "in"]
GivenForm = Literal["full", "sharded", "dcp", "rank_files"]
Loads = Literal["model", "optimizer", "both"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Promises of a method that extracts or loads.

    direction: ``out`` for a method that extracts: ``case/yielded.py`` compares every yielded tensor with the rest of
        the contract. ``in`` for a method that loads: ``case/loaded_state.py`` compares every shard of the model with
        the checkpoint.

    For a method that extracts:

    form: ``full``: unsharded tensors. ``sharded``: DTensors or ShardedTensors whose local part is this rank's shard.
        ``local``: this rank's shard as a plain tensor, and its place. ``flat``: FSDP1's flat shards; in a shard group
        of one rank, which has none, full tensors. ``info``: (shape, dtype) pairs without data. ``optimizer``: unsharded
        optimizer state, named ``<parameter>.<state>``.
    device: ``compute``: the rank's accelerator. ``cpu``. ``parameter``: the device that the parameter itself reports
        when the method starts. ``any``.
    dtype: ``master``: the parameter's own dtype. ``compute``: FSDP's mixed-precision param dtype. ``any``: the
        reference is cast to the dtype of the yielded tensor before the comparison.
    ranks: the ranks that get data.
    keys: ``state_dict``: every name of every parameter, including tied ones, and persistent buffers. ``parameters``:
        each parameter once, under its first name. ``any name``: like ``state_dict``, but a tied parameter needs only
        one of its names, as in safetensors files.
    weights: for a model with LoRA adapters. ``own``: its tensors unchanged, under their own names. ``merged``: the
        tensors of the model that peft was given, with the adapters added. ``adapter``: only the adapter, named as in
        peft's files.
    streams: the streams on which entries may be asked for: ``any``, or only the ``one`` that is current at the call.
    keeps: whether a yielded tensor may be kept; otherwise it must be read before the next tensor is asked for.

    For a method that loads, ``ranks`` and ``weights`` describe what it is given, and:

    given: the form of its argument ``state``. ``full``: unsharded host tensors by name. ``sharded``: tensors in the
        form of this strategy's sharded state dict. ``dcp``: the directory of a distributed checkpoint. ``rank_files``:
        a directory with a file of ``torch.save`` for each rank.
    loads: the weights, the optimizer's state, or both; for both, ``state`` is a mapping with ``model`` and
        ``optimizer``.
    strict: whether a checkpoint whose names do not fit is an error. Otherwise the names that fit are loaded, and the
        method returns the names that the checkpoint lacks, like ``load_state_dict``.
    """

    form: PromisedForm = "full"
    device: PromisedDevice = "compute"
    dtype: PromisedDtype = "master"
    ranks: PromisedRanks = "all"
    keys: PromisedKeys = "state_dict"
    weights: PromisedWeights = "own"
    streams: PromisedStreams = "any"
    keeps: bool = True
    direction: Direction = "out"
    given: GivenForm = "full"
    loads: Loads = "model"
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method that extracts or loads weights, of the matrix or of a framework's matrix.

    summary: the method as a line of code.
    only: by axis, the values with which the method makes sense.
    """

    name: str
    summary: str
    contract: Contract = field(default_factory=Contract)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        return self.contract.direction

    def has_values(self, values: Mapping[str, str]) -> bool:
        """Returns whether the method makes sense in a scenario with these values by axis."""
        return allows_values(self.only, values)


def allows_values(only: Mapping[str, tuple[str, ...]], values: Mapping[str, str]) -> bool:
    """Returns whether each axis in ``only`` has one of its allowed values."""
    return all(values[axis] in allowed for axis, allowed in only.items())


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Promises(TypedDict, total=False):
    """Keyword arguments with which a user declares a contract; see :class:`Contract`."""

    device: PromisedDevice
    dtype: PromisedDtype
    ranks: PromisedRanks
    keys: PromisedKeys
    weights: PromisedWeights
    streams: PromisedStreams
    keeps: bool
    direction: Direction
    given: GivenForm
    loads: Loads
    strict: bool


_WORDS: dict[str, tuple[Any, ...]] = {
    "device": get_args(PromisedDevice),
    "dtype": get_args(PromisedDtype),
    "ranks": get_args(PromisedRanks),
    "keys": get_args(PromisedKeys),
    "weights": get_args(PromisedWeights),
    "streams": get_args(PromisedStreams),
    "keeps": (True, False),
    "direction": get_args(Direction),
    "given": get_args(GivenForm),
    "loads": get_args(Loads),
    "strict": (True, False),
}


def promises(**words: Unpack[Promises]) -> Callable[[_Function], _Function]:
    """Declares what your method promises; see :class:`Contract`.

    Without a declaration, ``--method module:function`` is expected to extract full tensors on the compute device, in
    the parameters' own dtype, under every name of the state dict, on every rank. A loader needs ``direction="in"``.
    Raises TypeError for an unknown argument, ValueError for an unknown value.
    """
    for name, value in words.items():
        if name not in _WORDS:
            raise TypeError(f"promises() has no {name!r}; it has {', '.join(_WORDS)}")
        if value not in _WORDS[name]:
            raise ValueError(f"unknown value {value!r}; use one of {', '.join(map(str, _WORDS[name]))}")

    def mark(function: _Function) -> _Function:
        function.contract = Contract(**words)  # type: ignore[attr-defined]
        return function

    return mark
