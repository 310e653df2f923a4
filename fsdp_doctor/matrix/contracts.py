"""The contract of a method: the table of methods has those of the matrix, ``promises`` declares that of a user's
method.
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

    direction: ``out`` for a method that extracts. ``case/yielded.py`` holds every yielded tensor against the rest
        of the contract. ``in`` for one that loads; ``case/loaded_state.py`` holds every shard of the model against
        the checkpoint.

    Of a method that extracts:

    form: ``full`` unsharded tensors; ``sharded`` DTensors or ShardedTensors whose local part is
        this rank's shard; ``local`` this rank's shard as a plain tensor, and its place; ``flat`` FSDP1's flat
        shards, and full tensors in a shard group of one, which has none; ``info`` (shape, dtype) pairs and no data;
        ``optimizer`` unsharded optimizer state, named ``<parameter>.<state>``.
    device: ``compute`` the rank's accelerator; ``cpu``; ``parameter`` the device that the
        parameter itself reports when the method starts; ``any``.
    dtype: ``master`` the parameter's own dtype; ``compute`` FSDP's mixed-precision param dtype;
        ``any``: compared after the reference is cast to whatever dtype came.
    ranks: which ranks are given data.
    keys: ``state_dict`` every name of every parameter, tied ones too, and persistent buffers;
        ``parameters`` each parameter once, under its first name; ``any name`` the same as ``state_dict``, but a
        tied parameter under one of its names at least, as files of safetensors hold it.
    weights: of a model with LoRA adapters, ``own`` its tensors as they are, under their own names;
        ``merged`` those of the model that peft was given, with the adapters added; ``adapter`` the
        adapter alone, named as in peft's files.
    streams: the streams on which entries may be asked for: ``any``, or the ``one`` that is current at the call.
    keeps: whether a yielded tensor may be kept; otherwise it is to be read before the next one is asked for.

    Of a method that loads, ``ranks`` and ``weights`` say what it is given, and:

    given: what its argument ``state`` is. ``full`` unsharded host tensors by name; ``sharded`` tensors as this
        strategy's sharded state dict has them; ``dcp`` the directory of a distributed checkpoint; ``rank_files`` a
        directory with a file of ``torch.save`` for each rank.
    loads: the weights, the optimizer's state, or both: then ``state`` is a mapping with ``model`` and ``optimizer``.
    strict: whether a checkpoint whose names do not fit is an error. Otherwise what fits is loaded, and the method
    returns the names that the checkpoint lacks, as ``load_state_dict`` does.
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
    """A method that extracts or loads weights: one of the matrix or of a framework's matrix.

    summary: the method in code. only: by axis, the values with which it makes sense.
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
    """Returns whether each axis in ``only`` has one of the values that are allowed there."""
    return all(values[axis] in allowed for axis, allowed in only.items())


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Promises(TypedDict, total=False):
    """The keyword arguments with which a user declares a contract; see :class:`Contract`."""

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

    Without it ``--method module:function`` is held to extract full tensors on the compute device, in the
    parameters' own dtype, under every name of the state dict, on every rank. A loader says ``direction="in"``.

    Raises TypeError for a name, ValueError for a word that a contract does not have.
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
