"""Published errors of a resume: the programs in the tests of ``fsdp-doctor resume``, and two unseen programs."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
import tempfile
from typing import Any

from .entries import ERRORS, publish
from .unseen import resumes as unseen

TESTS = pathlib.Path(__file__).resolve().parents[2] / "tests"


def _read_programs() -> Any:
    spec = importlib.util.spec_from_file_location("resume_programs", TESTS / "resume" / "programs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAMS = _read_programs()
# By program: where it was published, what mended it, and the value of which the answer must speak.
_PUBLISHED: dict[str, tuple[str, str, str]] = {
    "EmptyTemplate": ("KempnerInstitute/KempnerForge#115", "", "no optimizer state"),
    "OptionsNotLoaded": ("PrimeIntellect-ai/prime-rl#3561", "PrimeIntellect-ai/prime-rl#3560", "weight_decay"),
    "DummyStateKept": ("NVIDIA-NeMo/Megatron-Bridge#5680", "", "exp_avg"),
    "MastersNotRefreshed": ("PrimeIntellect-ai/prime-rl#3234", "", "the optimizer's own copies"),
    "MastersFromBfloat16": ("TensorAuto/OpenTau#185", "", "optimizer 0 parameter 0"),
    "QuantizedState": ("databricks/flashoptim#3", "", "exp_avg"),
    "FirstSaveAgain": ("NVIDIA-NeMo/RL#3312", "", "the weights are from before step 3"),
    "UnevenShardsKept": ("pytorch/torchtitan#1136", "pytorch/pytorch#163130", "2.weight"),
    "ScheduleTwice": ("THUDM/slime#1546", "THUDM/slime#1547", "last_epoch"),
    "LengthOfTheRest": ("Nerogar/OneTrainer#1604", "", "T_max"),
    "ScalerAdvanced": ("huggingface/accelerate#4289", "", "_growth_tracker"),
    "EmaMadeAnew": ("m2lines/Samudra#282", "m2lines/Samudra#313", "Ema"),
    "LoaderNotSaved": ("KempnerInstitute/KempnerForge#51", "", "the first batch"),
    "SkipOffByOne": ("Red-Hat-AI-Innovation-Team/mini_trainer#79", "", "the first batch"),
    "LoaderExhausted": ("verl-project/verl#5725", "", "no training step"),
    "OffsetLost": ("KempnerInstitute/KempnerForge#57", "KempnerInstitute/KempnerForge#58", "the first batch"),
    "GeneratorNotLoaded": ("vllm-project/speculators#1027", "", "the generator of torch"),
    "GeneratorAfterFirstBatch": (
        "huggingface/transformers#46628",
        "huggingface/transformers#46628",
        "batch 5 has other values",
    ),
    "SeededAgain": ("modelscope/ms-swift#9935", "", "the generator of torch"),
    "GeneratorOfRankZero": ("NVIDIA/Megatron-LM#6858", "", "the generator of torch"),
    "StepLabel": ("verl-project/verl#7933", "", "the logged step"),
}
# Of which the program says no more than where it was published.
_ABOUT = {
    "LoaderNotSaved": "The loader's position is not saved, and a resumed run begins with the first batch.",
    "EmaMadeAnew": "The average of the weights is made anew.",
    "SkipOffByOne": "One batch too many or too few is skipped.",
    "GeneratorNotLoaded": "The generators are not saved.",
    "SeededAgain": "The seed is set again after the load.",
}
for _name, (_source, _mended_by, _value) in _PUBLISHED.items():
    _program = getattr(PROGRAMS, _name)
    _told = (_program.__doc__ or "").partition(": ")[2].splitlines()
    _about = _ABOUT.get(_name) or _told[0][0].upper() + _told[0][1:]
    publish(_source, _mended_by, names=(_value,), about=_about)(_program)
publish(
    *("KempnerInstitute/KempnerForge#115", "KempnerInstitute/KempnerForge#115"),
    names=("no optimizer state",),
    first_run="missed",
)(unseen.ResumeTemplateWithoutMoments)
publish(
    *("NVIDIA/nvidia-resiliency-ext#376", "NVIDIA/nvidia-resiliency-ext#376"),
    names=("step of 27",),
    first_run="false alarm: shapes, of the mended form too",
)(unseen.AsyncWorkerAliasedStep)
_MENDED = "-mended"
CLEAN_RESUMES = (
    *("Right", "Sharded", "EndOfEpoch", "SecondEpoch", "Twice", "Accumulated", "TimeSeed", "Closure", "TwoOptimizers"),
    *("Augmented", "Masters", "Scratch", "Grouped"),
    *(f"{name}{_MENDED}" for name in unseen.JOBS),
)


def judge(name: str) -> tuple[int, str]:
    """Returns the exit code and the sentence of ``fsdp-doctor resume`` for a program."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    judge_run = importlib.import_module("support.resumed").judge

    bare = name.removesuffix(_MENDED)
    if bare in unseen.JOBS:
        options = ("--mended",) if bare != name else ()
        file, program, ranks, twice = str(unseen.__file__), unseen.JOBS[bare], 2, False
    else:
        options, file, program = (), "programs.py", getattr(PROGRAMS, name)
        ranks, twice = program.ranks, program.twice
    with tempfile.TemporaryDirectory() as work:
        answer = judge_run(
            *(file, bare, "--dir", "{dir}", *options),
            resume=("--resume",),
            work=pathlib.Path(work),
            ranks=ranks,
            at=program.at,
            twice=twice,
        )
    return answer.exit_code, " ".join([answer.sentence, *(finding.text for finding in answer.findings)])


RESUMES = tuple(name for name in ERRORS if name in _PUBLISHED or name in unseen.JOBS)
