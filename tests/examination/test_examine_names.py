"""``examine`` says which names the model has, and which the Hub would have."""

from __future__ import annotations

import pytest
from support.families import new_family
from torch import nn

from fsdp_doctor import examine


def test_a_fused_tensor_has_a_hub_name_for_each_of_its_parts() -> None:
    examination = examine(new_family("qwen3-moe"))
    names = examination.facts.names
    assert (names.model_names, len(names.others)) == (25, 4)
    down = names.others["model.layers.0.mlp.experts.down_proj"]
    assert sorted(down) == [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    assert "4 of 25 tensors have other names on the Hub" in str(examination)
    assert down[0] not in repr(examination)


@pytest.mark.parametrize(("family", "others"), [("llama", 0), ("llava", 64)])
def test_a_tensor_with_another_prefix_on_the_hub_is_counted(family: str, others: int) -> None:
    assert len(examine(new_family(family)).facts.names.others) == others


def test_of_a_model_that_is_not_of_transformers_nothing_is_said() -> None:
    examination = examine(nn.Linear(2, 2))
    assert "not a model of transformers" in examination.facts.names.unknown
    assert "names" not in str(examination)
