"""The formulas of names and shapes in ``verify`` are those of the classes of transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from fsdp_doctor.checkpoints.checks.classes import CROSS_ATTENTIONS, OUTSIDE_LAYERS, SHAPE_FORMULAS, compute_dim

# Models that have the others in them.
_AROUND = {
    "clip_vision_model": ("clip", "vision_config"),
    "clip_text_model": ("clip", "text_config"),
    "siglip_vision_model": ("siglip", "vision_config"),
    "siglip_text_model": ("siglip", "text_config"),
}
_FEW_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


def make_class(model_type: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Makes a class on the meta device; returns the shapes by name, and the settings for the type."""
    outer, key = _AROUND.get(model_type, (model_type, ""))
    config = transformers.AutoConfig.for_model(outer)
    for each in _FEW_LAYERS:
        if isinstance(getattr(config, each, None), int):
            setattr(config, each, 4)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    settings = config.to_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, settings[key] if key else settings


@pytest.mark.parametrize("model_type", SHAPE_FORMULAS)
def test_the_formulas_of_a_type_give_the_shapes_of_its_class(model_type: str) -> None:
    shapes, settings = make_class(model_type)
    judged, names = set(), {formula.name for formula in SHAPE_FORMULAS[model_type]}
    for formula in SHAPE_FORMULAS[model_type]:
        found = {shape for name, shape in shapes.items() if formula.name.fullmatch(name)}
        expected = tuple(compute_dim(dim, settings) for dim in formula.dims)
        if None not in expected:
            assert found == {expected}, formula.name.pattern
            judged.add(formula.name)
    assert judged == names


@pytest.mark.parametrize("model_type", CROSS_ATTENTIONS)
def test_only_the_decoder_of_a_type_has_cross_attention(model_type: str) -> None:
    shapes, _ = make_class(model_type)
    form = CROSS_ATTENTIONS[model_type]
    places = [(name, found) for name in shapes if (found := form.layer.fullmatch(name))]
    crossed = {found["place"] for name, found in places if f".{form.attention}" in name}
    assert crossed == {found["place"] for _, found in places if found["side"] == "decoder"} != set()


@pytest.mark.parametrize("model_type", OUTSIDE_LAYERS)
def test_the_class_of_a_type_has_the_tensors_outside_of_layers(model_type: str) -> None:
    shapes, _ = make_class(model_type)
    for pattern in OUTSIDE_LAYERS[model_type]:
        assert [name for name in shapes if re.search(rf"(?:^|\.){pattern}$", name)], pattern
