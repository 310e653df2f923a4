"""Each published cause of a wrong resume is named, and a right program is not suspected."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest
import torch
from support.emulation import needs_emulation
from support.resumed import judge

from fsdp_doctor.resume.causes import read_causes
from fsdp_doctor.resume.diagnosis import ResumeAnswer

_SPEC = importlib.util.spec_from_file_location("resume_programs", pathlib.Path(__file__).with_name("programs.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_PROGRAMS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PROGRAMS)

# By program: the cause that is named first, or among the first where records cannot tell two apart.
WRONG = {
    "EmptyTemplate": "empty-template-for-optimizer",
    "OptimizerOfRankZero": "optimizer-of-one-rank",
    "OptionsNotLoaded": "optimizer-options-not-loaded",
    "DummyStateKept": "state-of-a-dummy-step",
    "MastersNotRefreshed": "masters-not-refreshed",
    "QuantizedState": "quantized-state-in-dcp",
    "MastersFromBfloat16": "masters-from-bf16",
    "UnevenShardsKept": "shards-from-a-kept-state-dict",
    "FirstSaveAgain": "an-earlier-save-again",
    "ScheduleTwice": "schedule-counted-twice",
    "ScheduleSavedBeforeStep": "schedule-saved-before-its-step",
    "ScheduleAfterLoad": "schedule-made-after-the-load",
    "LengthOfTheRest": "length-of-schedule",
    "ScalerNotLoaded": "scaler-not-loaded",
    "ScalerAdvanced": "scaler-advanced",
    "EmaMadeAnew": "average-made-anew",
    "WeightsOfEma": "weights-are-the-average",
    "LoaderNotSaved": "loader-not-saved",
    "SkipOffByOne": "wrong-number-of-skipped-batches",
    "SkipWithoutAccumulation": "wrong-number-of-skipped-batches",
    "EpochNotSet": "epoch-not-set",
    "LoaderExhausted": "loader-is-exhausted",
    "OffsetLost": "second-resume-loses-the-offset",
    "GeneratorNotLoaded": "generators-not-saved",
    "GeneratorAfterFirstBatch": "generators-after-the-first-batch",
    "SeededAgain": "seeded-again",
    "GeneratorOfRankZero": "generators-of-one-rank",
    "HiddenState": "unseen-state",
}
# A seed that is set again and a state that is not loaded leave the same behind.
INDISTINCT = ("GeneratorNotLoaded", "SeededAgain")
RIGHT = (
    *("Right", "Sharded", "EndOfEpoch", "SecondEpoch", "Twice", "Accumulated", "TimeSeed", "Closure", "TwoOptimizers"),
    *("Augmented", "Masters", "Scratch", "Grouped"),
    "StepLabel",  # wrong in what it logs alone, which no record has
)


def _judge(name: str, work: pathlib.Path, **options: Any) -> ResumeAnswer:
    program = getattr(_PROGRAMS, name)
    chosen = {"ranks": program.ranks, "at": program.at, "twice": program.twice, **options}
    return judge("programs.py", name, "--dir", "{dir}", resume=("--resume",), work=work, **chosen)


@pytest.mark.parametrize("name", WRONG)
def test_a_published_cause_is_named(name: str, tmp_path: pathlib.Path) -> None:
    answer = _judge(name, tmp_path)
    assert answer.exit_code == 1, answer
    causes = [cause.id for cause in answer.findings[0].causes]
    assert WRONG[name] in causes[: 2 if name in INDISTINCT else 1], answer.findings


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_the_same_run(name: str, tmp_path: pathlib.Path) -> None:
    answer = _judge(name, tmp_path)
    assert (answer.exit_code, answer.findings) == (0, [])


@pytest.mark.parametrize("kind", ["Sgd", "Muon", "Adafactor", "FusedAdamW", "TensorLr", "AdamW8bit"])
def test_the_state_of_every_kind_of_optimizer_must_come_back(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "AdamW8bit":
        pytest.importorskip("torchao")
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9 and newer have it")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    wrong.mkdir()
    answer = _judge(kind, right)
    assert (answer.exit_code, answer.findings) == (0, [])
    answer = _judge(f"{kind}NotLoaded", wrong)
    _require_no_load(answer)


def _require_no_load(answer: ResumeAnswer) -> None:
    finding = answer.findings[0]
    assert (answer.exit_code, finding.symptom, finding.causes) == (1, "state-not-loaded", []), answer
    assert "did not call load_state_dict" in finding.text


def test_an_optimizer_that_is_never_loaded_has_no_known_cause(tmp_path: pathlib.Path) -> None:
    _require_no_load(_judge("SecondOptimizerNotLoaded", tmp_path))


def test_an_optimizer_loaded_in_place_is_not_taken_for_a_scheduler(tmp_path: pathlib.Path) -> None:
    finding = _judge("LoadedInPlace", tmp_path).findings[0]
    assert (finding.symptom, finding.causes) == ("options-not-loaded", [])
    assert "did not call load_state_dict of this optimizer" in finding.text


def test_state_of_another_parameter_is_told_and_no_published_cause_is_claimed(tmp_path: pathlib.Path) -> None:
    answer = _judge("GroupsByNumber", tmp_path)
    assert answer.exit_code == 1
    state, options = answer.findings[:2]
    assert (state.symptom, options.symptom) == ("state-of-another-parameter", "parameter-in-another-group"), answer
    assert all(name in state.text for name in ("0.weight", "2.weight")), state.text
    assert [finding.causes for finding in answer.findings[:2]] == [[], []]


def test_a_program_that_does_not_repeat_itself_is_not_called_wrong(tmp_path: pathlib.Path) -> None:
    answer = _judge("NotRepeatable", tmp_path)
    assert (answer.exit_code, answer.findings) == (3, [])


def test_missing_state_is_found_even_in_a_program_that_is_not_repeatable(tmp_path: pathlib.Path) -> None:
    answer = _judge("NotRepeatableNorLoaded", tmp_path)
    assert (answer.exit_code, answer.findings[0].symptom) == (1, "state-not-loaded")


def test_a_program_with_nondeterministic_kernels_can_be_made_deterministic(tmp_path: pathlib.Path) -> None:
    """Covers a kernel that asks torch, as those of CUDA do."""
    assert _judge("Unordered", tmp_path / "as-it-is").exit_code == 3
    assert _judge("Unordered", tmp_path / "deterministic", deterministic=True).exit_code == 0


def test_the_finding_of_accelerate_is_found_through_trainer(tmp_path: pathlib.Path) -> None:
    """docs/findings.md: under FSDP1 and SHARDED_STATE_DICT a resume restores no optimizer state."""
    needs_emulation()
    pytest.importorskip("accelerate")
    resume = ("--resume", "{dir}/checkpoint-{n}")
    command = ("on_frameworks.py", "trainer_fsdp1", "--dir", "{dir}")
    answer = judge(*command, resume=resume, work=tmp_path, ranks=2, emulated=True)
    assert [(finding.symptom, finding.ranks) for finding in answer.findings] == [("state-missing", [0, 1])]
    assert answer.findings[0].causes[0].known == "FD197"


def test_every_cause_has_a_program_or_is_of_one_framework() -> None:
    shown = {*WRONG.values()}
    assert {cause.id for cause in read_causes()} - shown == {"accelerate-fsdp1-sharded", "weights-not-loaded"}
