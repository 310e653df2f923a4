"""Every failure that is not known gets a reading: what does not fit, who and when, from which lines, what decides."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, UNSHARD, explained, traceback

from fsdp_doctor.explain.reading import Reading

_SITE = "/env/lib/python3.12/site-packages"


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    reading = explained(tmp_path, *lines).reading
    assert reading is not None
    return reading


@pytest.mark.parametrize(
    ("key", "word", "other"),
    [
        ("model.layers.0.attn._extra_state", "beside its weights", "optimizer"),
        ("optim.param_groups.decoder.lr", "setting", "weight"),
        ("optimizer.state.exp_avg.decoder", "optimizer's state", "tied"),
        ("train_loader.dp_rank_0.cursor", "data loader", "tied"),
        ("lm_head.weight", "tied", "optimizer"),
        ("critic.v_head.scale", "renamed", "optimizer"),
    ],
)
def test_a_lacking_key_is_read_by_what_it_names(tmp_path: pathlib.Path, key: str, word: str, other: str) -> None:
    reading = _read(tmp_path, f"RuntimeError: Missing key in checkpoint state_dict: {key}.")
    assert word in reading.clash
    assert key in reading.clash
    assert other not in reading.clash
    assert "checkpoint verify" in reading.decide or "same version" in reading.decide
    assert "allow_partial_load" not in reading.decide


@pytest.mark.parametrize(
    ("frame", "raised", "who", "when", "clash"),
    [
        ("torch/optim/adam.py", "NotImplementedError: DTensor does not support cross-mesh operation yet!",
         "torch's optimizer", "the optimizer's step", "meshes"),
        ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "RuntimeError: The size of tensor a (9) must match the "
         "size of tensor b (21) at non-singleton dimension 1", "torch's FSDP2", "", "12 apart"),
        ("torch/distributed/checkpoint/planner_helpers.py", "ValueError: no such thing",
         "torch's distributed checkpoint", "", ""),
    ],
    ids=["mesh", "shape", "place alone"],
)  # fmt: skip
def test_who_and_when_are_read_from_the_frames(
    tmp_path: pathlib.Path, frame: str, raised: str, who: str, when: str, clash: str
) -> None:
    reading = _read(tmp_path, BEGIN, f'  File "{_SITE}/{frame}", line 7, in run', raised)
    assert (reading.who, reading.when) == (who, when)
    assert clash in reading.clash
    assert reading.lines[0].endswith("line 3")


def test_a_known_failure_and_another_cause_have_no_reading(tmp_path: pathlib.Path) -> None:
    assert explained(tmp_path, *traceback(UNSHARD.format(0))).reading is None
    assert explained(tmp_path, "OSError: [Errno 28] No space left on device").reading is None


@pytest.mark.parametrize(
    ("lines", "clash", "decide", "places"),
    [
        (["step 7 loss 0.9", "Resuming step 7", "step 8 loss: 3.25"], "loss is 3.25", "fsdp-doctor resume", (1, 2, 3)),
        (["{'loss': 1.0, 'grad_norm': 0.5}", "loaded checkpoint", "{'loss': 1.1, 'grad_norm': 60.0}"],
         "grad_norm is 60", "fsdp-doctor resume", (1, 2, 3)),
        (["Some weights of QwenForCausalLM were not initialized from the checkpoint and are newly initialized"],
         "QwenForCausalLM", "checkpoint verify", (1,)),
        (["[rank1]: saving to /c/step-2026-01", "[rank0]: saving to /c/step-2026-00"],
         "rank 1 saves to /c/step-2026-01", "checkpoint verify", (1, 2)),
        (["step:3 - actor/rollout_probs_diff_max:0.97"], "is 0.97", "fingerprint", (1,)),
    ],
    ids=["loss", "gradient norm", "random weights", "two directories", "drift"],
)  # fmt: skip
def test_a_symptom_without_an_exception_is_read(
    tmp_path: pathlib.Path, lines: list[str], clash: str, decide: str, places: tuple[int, ...]
) -> None:
    explanation = explained(tmp_path, *lines)
    assert explanation.showing == "nothing"
    assert explanation.reading is not None
    assert clash in explanation.reading.clash
    assert decide in explanation.reading.decide
    assert [line.rpartition(" ")[2] for line in explanation.reading.lines] == [str(place) for place in places]


@pytest.mark.parametrize(
    "lines",
    [
        ["step 7 loss 0.9", "step 8 loss 3.25"],
        ["step 7 loss 0.90", "loaded checkpoint", "step 8 loss 0.93"],
        ["[rank1]: saving to /c/step-1", "[rank0]: saving to /c/step-1"],
        ["[rank1]: saving to /c/step-1/rank_1", "[rank0]: saving to /c/step-1/rank_0"],
        ["step:3 - actor/rollout_probs_diff_max:0.04"],
    ],
    ids=["no load", "noise", "one directory", "a file for each rank", "rounding"],
)
def test_what_every_run_shows_is_no_symptom(tmp_path: pathlib.Path, lines: list[str]) -> None:
    assert explained(tmp_path, *lines).reading is None
