"""A failure that is told in prose gets a reading: what was seen, after what, what it can be, and what decides."""

from __future__ import annotations

import pathlib
import re

import pytest
from support.written_logs import explained

from fsdp_doctor.explain.circumstances import find_causes, read_circumstances
from fsdp_doctor.explain.mechanisms import Reading, read_mechanisms
from fsdp_doctor.explain.prose import _expand, _read_tables, is_prose
from fsdp_doctor.explain.tables import compile_pattern


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    explanation = explained(tmp_path, *lines)
    assert explanation.showing == "nothing"
    assert explanation.grade is None
    assert explanation.reading is not None
    return explanation.reading


@pytest.mark.parametrize(
    ("told", "clash", "decide"),
    [
        ("Our FSDP job was restarted, and after we resumed it the perplexity is much higher than before.",
         "after a resume, the loss", "fsdp-doctor resume -- COMMAND"),
        ("The HF folder that the FSDP run wrote is in float32 although I load the model in bfloat16.",
         "another dtype", "checkpoint verify"),
        ("Under fully_shard the safetensors file is only 40 MB, the model has 7B parameters.",
         "less than the model", "flat and empty tensors"),
        ("Each checkpoint takes 26 GB instead of 13 GB since we use FSDP.", "larger than what was trained", "dtypes"),
        ("With FSDP the merged model only writes gibberish.",
         "after a merge or conversion, the model's output is nonsense", "checkpoint diff GOOD DIR"),
        ("On 16 ranks the run hangs when it saves.", "after a save, the job does not go on", "py-spy dump"),
        ("After every save the GPU memory of all ranks grows by 3 GB.", "after a save, memory grows", "memory measure"),
        ("vLLM still answers with the old weights after update_weights.", "trainer and engine do not agree",
         "fingerprint"),
        ("With FSDP the LoRA has no effect: the answers are identical to those of the base model.",
         "like the one before the training", "checkpoint verify ADAPTER"),
        ("The optimizer state is lost when we resume on another number of GPUs.", "besides the weights",
         "fsdp-doctor resume -- COMMAND"),
        ("On two GPUs the model starts with randomly initialized weights.", "not the checkpoint's values",
         "checkpoint fingerprint"),
        ("The weights never change under FSDP2, whatever the learning rate is.", "does not change the weights",
         "examine(model, optimizer)"),
        ("After the resume the sampler gives each sample twice.", "data do not go on", "fsdp-doctor resume -- COMMAND"),
        ("Under FSDP2 each rank starts with other weights.", "the ranks do not have the same weights",
         "fingerprint(model)` on all ranks"),
        ("With FSDP the weights are modified by every evaluation.", "change although nothing trains them",
         "before and after"),
        ("fully_shard breaks the tie of lm_head and the embedding.", "no longer one tensor", "tie_weights"),
        ("The setting use_orig_params has no effect in our FSDP run.", "a setting has no effect",
         "fsdp-doctor check CONFIG"),
    ],
)  # fmt: skip
def test_what_people_see_is_read_with_the_event_and_the_command(
    tmp_path: pathlib.Path, told: str, clash: str, decide: str
) -> None:
    reading = _read(tmp_path, told)
    assert clash in reading.clash
    assert decide in reading.decide
    assert "It can be that" in reading.decide
    assert reading.decide.rstrip(").").endswith("?") or "?" in reading.decide


@pytest.mark.parametrize(
    ("circumstance", "cause"),
    [
        ("The vocabulary is not divisible by the number of GPUs.", "last of which is shorter"),
        ("It only happens with the paged_adamw optimizer states that we resume.", "optimizer's state is not"),
        ("We train on 8 GPUs and resume on 4.", "another number of ranks"),
    ],
)
def test_a_named_circumstance_is_the_first_possible_cause(
    tmp_path: pathlib.Path, circumstance: str, cause: str
) -> None:
    told = "With FSDP the loss after the resume is not the one of the first run."
    reading = _read(tmp_path, told, circumstance)
    assert cause in reading.decide.split("(2)")[0] + reading.clash
    assert cause not in _read(tmp_path, told).decide.split("(2)")[0]


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-05 10:11:12 INFO the loss after the resume is higher than before",
        "[rank0]: the save hangs on this rank",
        '  File "train.py", line 3, in the_model_is_broken',
        "        the weights are not updated in this branch",
        "RuntimeError: the weights are not loaded and the model is broken",
        "loss=0.5 the model is not updated after the save",
        "{'loss': 0.3, 'grad_norm': 0.1, 'the model is': 'not saved'}",
    ],
)
def test_records_frames_and_code_are_no_prose(line: str) -> None:
    assert not is_prose(line)


def test_the_title_of_an_issue_is_read(tmp_path: pathlib.Path) -> None:
    assert "the job does not go on" in _read(tmp_path, "# [Bug] [FSDP2] the second save hangs on 16 ranks").clash


def test_what_should_be_counts_less_than_what_is(tmp_path: pathlib.Path) -> None:
    wish = "With FSDP the memory should not grow after a save."
    assert "another dtype" in _read(tmp_path, wish, "The saved file is in float32 instead of bfloat16.").clash


@pytest.mark.parametrize(
    "told",
    [
        "How can I make the tokenizer add an end token to each of the answers?",
        "I would like to use FSDP for a model of 70B. Which GPU do you recommend for it?",
        "The resume from the checkpoint works fine with FSDP, and the loss goes on as it was.",
        "The chat template of the model is wrong, so the answers are too long.",
    ],
)
def test_a_question_or_a_good_run_is_no_symptom(tmp_path: pathlib.Path, told: str) -> None:
    assert explained(tmp_path, told).reading is None


def test_a_word_inside_of_another_word_is_not_read(tmp_path: pathlib.Path) -> None:
    told = "With FSDP we changed the semantics of the shanghai branch after a save."
    assert explained(tmp_path, told).reading is None


def test_every_pattern_of_the_tables_compiles_and_names_what_exists() -> None:
    tables = _read_tables()
    events = {event.name for event in tables.event}
    names = {observation.name for observation in tables.observation}
    for observation in tables.observation:
        assert {*observation.events, *observation.decide_after} <= events
        assert {*observation.causes} <= {*events, "any"}
        assert all(compile_pattern(_expand(pattern)) for pattern in observation.shown)
    mechanisms = {subject for mechanism in read_mechanisms() for subject in mechanism.subjects}
    for circumstance in read_circumstances():
        assert {*circumstance.means} <= {*events, *names, *mechanisms}, circumstance.name
        assert all(re.compile(pattern) for pattern in circumstance.shown)


def test_circumstances_say_only_what_belongs_to_the_subject() -> None:
    names, causes = find_causes("LoRA with a tied head and a quantized base", ["merge"])
    assert names == ["quantized weights", "tied weights", "an adapter (LoRA)"]
    assert all("engine" not in cause for cause in causes)
    assert find_causes("LoRA with a tied head", ["left_on_cpu"]) == ([], [])
