"""Traces the activations of a forward and a backward, while the model runs on the meta device.

On the meta device nothing is computed, but every tensor has a size and a lifetime. Attention is replaced by an
implementation that allocates the same tensors as a fused CUDA kernel.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fsdp_doctor.examination.memory_records import round_up
from fsdp_doctor.plan.meta_model import checkpoint_layers, find_followed_layers, fuse_attention
from fsdp_doctor.weights.fsdp import private

# The limit of operators in one layer's forward: a constant, and a number for each token. Measured: a layer of the tried
# models has at most 260 operators; a layer that loops over chunks of tokens adds less than one operator per token, and
# a layer that loops over single tokens adds at least nine.
_OPERATORS, _OPERATORS_OF_A_TOKEN = 1000, 4

Pass: TypeAlias = Literal["forward", "backward"]
# The number of a decoder layer, or the root's computation before the first layer and after the last.
SegmentPlace: TypeAlias = int | Literal["before", "after"]


@dataclass(frozen=True)
class LiveBytes:
    """The bytes that are allocated at one moment: activations, and gradients of unsharded parameters."""

    activations: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.gradients


@dataclass(frozen=True)
class Segment:
    """The memory of one part of a step, such as the forward of one layer.

    highest: the bytes at the peak of the part.
    end: the bytes at the end of the part.
    """

    of: Pass
    place: SegmentPlace
    highest: LiveBytes
    end: LiveBytes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of one forward.

    length: the number of tokens of each sequence.
    checkpointing: whether each layer is recomputed in the backward.
    backward: whether the forward is followed by a backward.
    """

    sequences: int
    length: int
    checkpointing: bool = False
    backward: bool = True


class LoopOverTokens(Exception):
    """Raised for a layer that seems to loop over single tokens, which would take minutes to trace."""


def trace(model: nn.Module, batch: Batch) -> tuple[Segment, ...]:
    """Traces forward, loss and backward of a model on the meta device, or only a forward and its log-probabilities.

    As under FSDP, the gradients of a decoder layer are freed when the layer's backward is done. Raises LoopOverTokens.
    """
    if batch.checkpointing and batch.backward:
        checkpoint_layers(model)
    recorder = _Recorder(model, most_operators=_OPERATORS + _OPERATORS_OF_A_TOKEN * batch.length)
    tokens = torch.zeros(batch.sequences, batch.length, dtype=torch.long, device="meta")
    with torch.device("meta"), recorder, fuse_attention(), torch.set_grad_enabled(batch.backward):
        if not batch.backward:
            log_probabilities = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
            recorder.close("forward", "after")
            del log_probabilities
            return tuple(recorder.segments)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        recorder.close("forward", "after")
        loss.backward()
        recorder.close_backward()
    return tuple(recorder.segments)


class _Recorder:
    """Records a segment wherever a decoder layer begins or ends."""

    def __init__(self, model: nn.Module, most_operators: int) -> None:
        self.segments: list[Segment] = []
        self._most_operators = most_operators
        self._live = _Live(model)
        self._layers = find_followed_layers(model)
        self._places = list(self._layers)
        self._in_backward = False
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for at, layer in self._layers.items():
            self._hooks += [
                layer.register_forward_pre_hook(
                    lambda _module, inputs, named, at=at: self._begin_layer(at, inputs, named), with_kwargs=True
                ),
                layer.register_forward_hook(lambda _module, _inputs, output, at=at: self._end_layer(at, output)),
            ]
        self._hooks += self._live.register_hooks()
        self._live.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def close(self, of: Pass, place: SegmentPlace) -> None:
        self.segments.append(Segment(of, place, self._live.highest, self._live.now))
        self._live.forget_highest()

    def close_backward(self) -> None:
        """Ends the trace of the backward, and the segment of a first layer that takes tokens.

        The input of such a layer, for example BERT's embeddings, has no gradient whose hook would end the segment.
        Raises ValueError if the backward does not go through one of the other layers.
        """
        reached = {segment.place for segment in self.segments if segment.of == "backward"}
        first = self._places[0]
        if missing := self._layers.keys() - reached - {first}:
            raise ValueError(f"its backward does not go through layer {min(missing)}")
        if first not in reached:
            self.close("backward", first)
        self.close("backward", "before")

    def _begin_layer(self, at: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._live.operators_left = None if self._in_backward else self._most_operators
        if not self._in_backward and at == self._places[0]:
            self.close("forward", "before")
            given = [tensor for tensor in (*inputs, *named.values()) if isinstance(tensor, Tensor)]
            hidden = next((tensor for tensor in given if tensor.requires_grad), None)
            if hidden is not None:
                hidden.register_hook(lambda _gradient: self._reach_backward(0))

    def _end_layer(self, at: int, output: Any) -> None:
        if self._in_backward:  # a checkpointed layer, once more
            return
        self._live.operators_left = None
        self.close("forward", at)
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self._reach_backward(self._places.index(at) + 1))

    def _reach_backward(self, after: int) -> None:
        """Ends the segment of the backward that has just computed the gradient of the output of layer ``after - 1``.

        after: the number of layers whose backward has not begun.
        """
        self._in_backward = True
        through = self._places[after] if after < len(self._places) else None
        self.close("backward", "after" if through is None else through)
        if through is not None:
            self._live.drop_gradients(self._layers[through])


class _Live(private.OperatorMode):
    """Counts each storage that an operator allocates, until the storage is freed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._sizes: dict[int, int] = {}
        self._gradients: set[int] = set()
        self._of_model = {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        # The ids stay those of these objects for as long as they live.
        self._kept = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self.now = self.highest = LiveBytes()
        # How many more operators the current layer may run.
        self.operators_left: int | None = None

    def register_hooks(self) -> list[Any]:
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        return [parameter.register_post_accumulate_grad_hook(self._is_gradient) for parameter in trained]

    def forget_highest(self) -> None:
        self.highest = self.now

    def drop_gradients(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if self.operators_left is not None:
            self.operators_left -= 1
            if self.operators_left < 0:
                raise LoopOverTokens
        if function is private.ITEM:
            # Models ask whether all values of a mask are alike: they are.
            return 1
        result = function(*arguments, **(named or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._sizes or key in self._of_model:
            return
        self._sizes[key] = round_up(storage.nbytes())
        weakref.finalize(storage, self._remove, key)
        self._change(self._sizes[key], 0)

    def _remove(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._gradients.discard(key)
            self._change(0, -size)
        else:
            self._change(-size, 0)

    def _is_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        key = id(parameter.grad.untyped_storage())
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self._change(-self._sizes[key], self._sizes[key])

    def _change(self, activations: int, gradients: int) -> None:
        self.now = LiveBytes(self.now.activations + activations, self.now.gradients + gradients)
        if self.now.total > self.highest.total:
            self.highest = self.now
