"""What is counted while a model runs on the meta device."""

from __future__ import annotations

import functools

import pytest

from fsdp_doctor.plan.activations import Batch, Segment, trace
from fsdp_doctor.plan.meta_model import on_meta

_LAYERS = 4
_BF16 = 2
_HIDDEN, _VOCABULARY = 256, 4096


@functools.cache
def _traced(length: int, *, checkpointing: bool = False, backward: bool = True) -> tuple[Segment, ...]:
    batch = Batch(sequences=1, length=length, checkpointing=checkpointing, backward=backward)
    return trace(on_meta("small"), batch)


def _kept(segments: tuple[Segment, ...]) -> int:
    """By the first layer for its backward."""
    forward = {segment.place: segment.end.activations for segment in segments if segment.of == "forward"}
    return forward[0] - forward["before"]


def test_a_step_goes_through_the_layers_and_back() -> None:
    places = [(segment.of, segment.place) for segment in _traced(128)]
    forward = [("forward", place) for place in ("before", *range(_LAYERS), "after")]
    backward = [("backward", place) for place in ("after", *reversed(range(_LAYERS)), "before")]
    assert places == [*forward, *backward]


def test_attention_keeps_no_matrix_of_all_pairs_of_tokens() -> None:
    assert _kept(_traced(512)) / _kept(_traced(256)) == pytest.approx(2, rel=0.02)


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    assert _kept(_traced(256, checkpointing=True)) == 256 * _HIDDEN * _BF16
    assert _kept(_traced(256)) > 8 * _kept(_traced(256, checkpointing=True))


def test_logits_are_held_in_float32_with_their_gradients() -> None:
    after = next(segment for segment in _traced(256) if (segment.of, segment.place) == ("backward", "after"))
    assert after.highest.activations > 3 * 256 * _VOCABULARY * 4


def test_gradients_of_a_layer_are_as_large_as_its_parameters_and_gone_at_the_next() -> None:
    layer = sum(p.numel() for p in on_meta("small").model.layers[1].parameters()) * _BF16
    first, second = (
        next(s for s in _traced(128) if (s.of, s.place) == ("backward", place)) for place in (_LAYERS - 1, 1)
    )
    assert first.end.gradients == second.end.gradients
    assert first.end.gradients >= layer


def test_everything_is_gone_when_a_step_is_over_but_the_gradients_of_the_root_and_the_first_layer() -> None:
    end = _traced(128)[-1].end
    assert end.activations < 128 * _HIDDEN * _BF16


def test_a_forward_alone_keeps_nothing_of_a_layer() -> None:
    segments = _traced(256, backward=False)
    assert {segment.of for segment in segments} == {"forward"}
    assert _kept(segments) <= 256 * _HIDDEN * _BF16
