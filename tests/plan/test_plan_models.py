"""Tests which models can be planned, and what is counted while one runs on the meta device."""

from __future__ import annotations

import functools
import json
import pathlib

import pytest
from support.inside import doctor

from fsdp_doctor.plan.activations import Batch, Segment, trace
from fsdp_doctor.plan.job import ModelHead
from fsdp_doctor.plan.meta_model import build_on_meta, read_shape

_VERL = ("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_kl_loss=true")
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_MODELS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("llama", "mistral", "gemma2", "gemma3_text", "qwen2", "qwen3", "olmo2"), _SIZES),
    **{kind: _SIZES | {"pad_token_id": 0} for kind in ("phi3", "glm4")},
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _SIZES
    | {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    | {"v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "num_heads": 4}
    | {"head_dim": 32, "state_size": 16, "n_groups": 1},
    # It has a parameter that is not trained.
    "ernie4_5_moe": _SIZES | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
    "gemma3": {
        "text_config": _SIZES | {"model_type": "gemma3_text"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "qwen2_5_vl": {
        "text_config": _SIZES
        | {"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "vision_config": _QWEN_VISION,
    },
}


def _directory(tmp_path: pathlib.Path, kind: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(_MODELS[kind] | {"model_type": kind}))
    return str(tmp_path)


_LAYERS, _HIDDEN, _VOCABULARY = 4, 256, 4096
_BF16 = 2


@functools.cache
def _traced(
    length: int, head: ModelHead = "language", *, checkpointing: bool = False, backward: bool = True
) -> tuple[Segment, ...]:
    batch = Batch(sequences=1, length=length, checkpointing=checkpointing, backward=backward)
    return trace(build_on_meta("small", head=head), batch)


def _kept(segments: tuple[Segment, ...]) -> int:
    """Bytes that the first layer keeps for its backward."""
    forward = {segment.place: segment.end.activations for segment in segments if segment.of == "forward"}
    return forward[0] - forward["before"]


@pytest.mark.parametrize("kind", _MODELS)
def test_a_model_is_planned_whatever_its_attention(kind: str, tmp_path: pathlib.Path) -> None:
    arguments = ("--model", _directory(tmp_path, kind), "--seq-len", "64", "--micro-batch", "1", "--gpus", "2")
    done = doctor("memory", "plan", *(word for one in _VERL for word in ("--config", one)), *arguments)
    assert done.code == 0, done.stderr
    assert done.stderr == ""
    for expected in ("actor: trains", "ref: computes log-probabilities"):
        assert expected in done.stdout


def _planned(directory: pathlib.Path, length: int, sizes: dict[str, object], *options: str) -> tuple[int, str]:
    (directory / "config.json").write_text(json.dumps(sizes))
    arguments = ("--model", str(directory), "--seq-len", str(length), "--gpus", "2", *options)
    done = doctor("memory", "plan", "--config", _VERL[0], *arguments)
    return done.code, done.stderr


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_sequence_longer_than_the_learned_positions_is_refused(kind: str, tmp_path: pathlib.Path) -> None:
    positions = {"n_positions": 64} if kind == "gpt2" else {"max_position_embeddings": 64}
    sizes = {"model_type": kind, "vocab_size": 512, "num_hidden_layers": 2} | positions
    code, said = _planned(tmp_path, 65, sizes)
    assert (code, "sequences of 65 tokens" in said, "64 positions" in said) == (2, True, True)
    assert _planned(tmp_path, 64, sizes)[0] == 0


def test_computed_positions_have_no_end(tmp_path: pathlib.Path) -> None:
    assert _planned(tmp_path, 65, _SIZES | {"model_type": "llama", "max_position_embeddings": 64})[0] == 0


_MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "state_size": 8}


def test_a_model_that_reads_tokens_one_by_one_is_refused_if_slow(
    tmp_path: pathlib.Path,
) -> None:
    code, said = _planned(tmp_path, 512, _MAMBA)
    assert (code, "loops over the tokens" in said, "at 512 tokens" in said) == (3, True, True)
    assert _planned(tmp_path, 32, _MAMBA)[0] == 0


def test_a_model_that_loops_over_chunks_is_planned_at_any_length(tmp_path: pathlib.Path) -> None:
    sizes = {**_MODELS["mamba2"], "model_type": "mamba2"}
    assert _planned(tmp_path, 8192, sizes)[0] == 0


def test_another_number_of_layers_is_planned_where_their_kinds_follow_from_it(tmp_path: pathlib.Path) -> None:
    assert _planned(tmp_path, 32, _MAMBA, "--layers", "3") == (0, "")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_no_fused_attention_keeps_a_matrix_of_all_pairs_of_tokens(kind: str, tmp_path: pathlib.Path) -> None:
    model = _directory(tmp_path, kind)
    short, long = (_kept(trace(build_on_meta(model), Batch(sequences=1, length=length))) for length in (512, 1024))
    assert long / short == pytest.approx(2, rel=0.02)


def test_a_tower_for_images_is_held_and_not_followed(tmp_path: pathlib.Path) -> None:
    model = build_on_meta(_directory(tmp_path, "qwen2_5_vl"))
    names = [parameter.name for unit in read_shape(model, "vl").layers for parameter in unit.parameters]
    places = {segment.place for segment in trace(model, Batch(sequences=1, length=64))}
    assert len(read_shape(model, "vl").layers) == 4
    assert any("self_attn" in name for name in names)
    assert any("attn.qkv" in name for name in names)
    assert places == {"before", 2, 3, "after"}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"model_type": "t5"}, "no language model of type t5"),
        ({"hidden_size": "x"}, "expected int, got str"),
        ({"hidden_size": 256, "num_attention_heads": 7}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": 0}, "the model has no decoder layers"),
    ],
)
def test_a_model_that_is_none_is_refused_with_what_is_wrong(
    sizes: dict[str, object], said: str, tmp_path: pathlib.Path
) -> None:
    code, stderr = _planned(tmp_path, 64, {"model_type": "llama", "num_hidden_layers": 1} | sizes)
    (line,) = stderr.splitlines()
    assert (code, said in line) == (2, True), line


def _after(head: ModelHead) -> int:
    """The most that is computed beside what the layers keep."""
    segments = {(segment.of, segment.place): segment for segment in _traced(256, head)}
    return segments["backward", "after"].highest.activations - segments["forward", 3].end.activations


def test_a_critic_has_one_output_and_no_logits_of_the_vocabulary() -> None:
    language, critic = (read_shape(build_on_meta("small", head=head), "small") for head in ("language", "value"))
    hidden, vocabulary = 256, 4096
    # The head of this language model is its embedding, which both have.
    assert critic.numel - language.numel == hidden + 1
    assert _after("language") > 3 * 256 * vocabulary * 4
    assert _after("value") < 10 * 256 * hidden * 2


def test_the_layers_of_a_critic_and_a_language_model_keep_equal_memory() -> None:
    assert _kept(_traced(256, "value")) == _kept(_traced(256))


def test_a_critic_is_planned_with_its_own_head() -> None:
    settings = (*_VERL[:1], "algorithm.adv_estimator=gae", "critic.strategy=fsdp2", "data.max_response_length=4096")
    config = [word for one in settings for word in ("--config", one)]
    done = doctor("memory", "plan", *config, "--model", "qwen3-4b", "--layers", "2", "--gpus", "2")
    assert done.code == 0, done.stderr
    assert "critic: trains" in done.stdout
    assert "a critic has a head of one output" in " ".join(done.stdout.split())
    assert "the value head of a critic" not in done.stdout
    actor, critic = (float(done.stdout.partition(f"  {role}: trains")[0].split()[-3]) for role in ("actor", "critic"))
    logits = 4608 * 151936 * 4 / (1 << 30)
    assert critic < actor - 2 * logits


def test_a_step_goes_through_the_layers_and_back() -> None:
    places = [(segment.of, segment.place) for segment in _traced(128)]
    forward = [("forward", place) for place in ("before", *range(_LAYERS), "after")]
    backward = [("backward", place) for place in ("after", *reversed(range(_LAYERS)), "before")]
    assert places == [*forward, *backward]


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    assert _kept(_traced(256, checkpointing=True)) == 256 * _HIDDEN * _BF16
    assert _kept(_traced(256)) > 8 * _kept(_traced(256, checkpointing=True))


def test_logits_are_held_in_float32_with_their_gradients() -> None:
    after = next(segment for segment in _traced(256) if (segment.of, segment.place) == ("backward", "after"))
    assert after.highest.activations > 3 * 256 * _VOCABULARY * 4


def test_gradients_of_a_layer_match_its_parameters_and_vanish_one_layer_later() -> None:
    layer = sum(p.numel() for p in build_on_meta("small").model.layers[1].parameters()) * _BF16
    first, second = (
        next(s for s in _traced(128) if (s.of, s.place) == ("backward", place)) for place in (_LAYERS - 1, 1)
    )
    assert first.end.gradients == second.end.gradients
    assert first.end.gradients >= layer


def test_only_gradients_of_root_and_first_layer_outlive_a_step() -> None:
    end = _traced(128)[-1].end
    assert end.activations < 128 * _HIDDEN * _BF16


def test_a_forward_alone_keeps_nothing_of_a_layer() -> None:
    segments = _traced(256, backward=False)
    assert {segment.of for segment in segments} == {"forward"}
    assert _kept(segments) <= 256 * _HIDDEN * _BF16
