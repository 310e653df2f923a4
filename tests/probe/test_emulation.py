"""The matrix on the emulated accelerator: the failures of a GPU, as real cases, on a machine without one."""

from __future__ import annotations

import pathlib

import pytest
import torch
from program import Run, forked_doctor, probe
from support.emulation import needs_emulation

from fsdp_doctor.known.catalogue import KnownFailure, list_expected_failures, read_catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import is_framework_id
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult

_HALF_MOVED = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"emulated:0".  This is no longer allowed; the devices must match.'
)
_GRADIENT = "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'emulated'"

# Case: the verdict, and what its reason says.
_CASES: dict[str, tuple[str, str]] = {
    # verl issue 5995
    "fsdp2/policy/staged/state_dict": ("crash", _HALF_MOVED),
    "fsdp2/policy/unstaged/state_dict": ("ok", ""),
    "fsdp2/policy/staged/parameters.full_tensor": ("misplaced", "on cpu where emulated was promised"),
    "fsdp2/policy/staged/from_local": ("poisoned", _GRADIENT),
    "fsdp2/policy/staged/full_tensors": ("ok", ""),
    # verl PR 4726
    "fsdp1/param/unstaged/full_state_dict": (
        "crash",
        "AssertionError: Expects tensor to be on the compute device emulated:0, was on cpu",
    ),
    "fsdp1/param/unstaged/full_tensors": ("ok", ""),
    "fsdp1/param/staged/full_state_dict": ("ok", ""),
    "fsdp2/param/unstaged/device-only/parameters.full_tensor": (
        "crash",
        "No backend type associated with device type cpu",
    ),
    "fsdp1/policy/unstaged/size1/get_model_state_dict.full": ("leak", "device memory not given back"),
    "fsdp2/none/unstaged/qwen3-moe/unshard": ("ok", ""),
    "fsdp2/policy/unstaged/qwen3.5/state_dict": ("ok", ""),
    "fsdp2/param/staged/state_dict.held": ("leak", "bytes of shards stay on the device though the model was offloaded"),
    # verl PR 7014
    "fsdp2/none/unstaged/qwen3-lora/lora.merged": ("ok", ""),
    "fsdp2/none/unstaged/qwen3-lora/lora.merged.read_late": ("wrong", "4096 of 4096 elements differ"),
    "fsdp2/none/unstaged/qwen3-lora/lora.adapter": ("ok", ""),
    "fsdp2/policy/staged/qwen3-lora/full_tensors": ("ok", ""),
    "fsdp1/param/unstaged/qwen3-lora/full_tensors": ("ok", ""),
    "fsdp1-orig/none/unstaged/qwen3-lora/full_tensors": ("ok", ""),
    "fsdp1/none/unstaged/qwen3-lora/lora.merged": ("ok", ""),
    "fsdp2/param/unstaged/qwen3-lora/uneven/full_tensors": ("ok", ""),
    # Ranks that gather different sizes stand still, as under NCCL; gloo alone would end a process.
    "fsdp2/none/unstaged/uneven/from_local": ("hang", "no progress in stage extract"),
}
# A non-blocking offload, read before it has arrived; the corruption of uneven weights; nothing of it
# where the doctor's copies are on time.
_RACES: dict[str, tuple[str, str]] = {
    "fsdp2/param/unstaged/nonblocking/state_dict": ("wrong", "elements differ"),
    "fsdp2/param/unstaged/nonblocking/parameters.full_tensor": ("wrong", "elements differ"),
    "fsdp2/param/staged/nonblocking/state_dict": ("ok", ""),
    "fsdp2/param/staged/uneven/nonblocking/weights_info": ("poisoned", "the loss of training step 3 is nan"),
}


# What a framework does itself, the tests of frameworks reproduce.
_REPRODUCED = [entry for entry in read_catalogue() if entry.reproduced and not is_framework_id(entry.evidence)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs all these and one case of each entry of the catalogue."""
    needs_emulation()
    cases = [case for case in _list_cases() if case not in _HANGS]
    return _probe_cases(tmp_path_factory.mktemp("run"), *cases)


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Makes those of them hang for which nobody waits as long."""
    needs_emulation()
    cases = [case for case in _list_cases() if case in _HANGS]
    return _probe_cases(tmp_path_factory.mktemp("hanging"), *cases, options=("--timeout", "8"))


_HANGS = {
    *(case for case, (kind, _) in _CASES.items() if kind == "hang"),
    *(entry.evidence for entry in _REPRODUCED if entry.verdict == "hang"),
}


def _list_cases() -> dict[str, None]:
    return dict.fromkeys([*_CASES, *_RACES, *_evidence("")])


def _find_result(request: pytest.FixtureRequest, case: str) -> CaseResult:
    shown: Run = request.getfixturevalue("hanging" if case in _HANGS else "run")
    return shown.result(case)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The evidence of what two ranks cannot be sharded as."""
    cases = [entry.evidence for entry in _REPRODUCED if _of_four_ranks(entry)]
    return _probe_cases(tmp_path_factory.mktemp("on_four_ranks"), *cases, options=("--nproc", "4"))


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The evidence that shows on the CPU alone."""
    return _probe_cases(tmp_path_factory.mktemp("on_the_cpu"), *_evidence("cpu"), device="cpu")


def _evidence(device: str) -> list[str]:
    entries = [entry for entry in _REPRODUCED if entry.shows_on(torch.__version__)]
    return [entry.evidence for entry in entries if entry.evidence_device == device and not _of_four_ranks(entry)]


def _of_four_ranks(entry: KnownFailure) -> bool:
    return not {"tp", "hidden-experts"}.isdisjoint(entry.evidence.split("/"))


def _probe_cases(
    directory: pathlib.Path,
    *cases: str,
    options: tuple[str, ...] = (),
    device: str = "emulated",
    env: dict[str, str] | None = None,
) -> Run:
    return probe(directory, *options, *(word for case in cases for word in ("--case", case)), device=device, env=env)


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


@pytest.mark.parametrize("case", list(_CASES))
def test_a_case_ends_as_it_does_on_a_gpu(request: pytest.FixtureRequest, case: str) -> None:
    verdict = _find_result(request, case).verdict
    assert verdict.kind == _CASES[case][0], verdict
    assert _CASES[case][1] in verdict.reason


def test_the_report_says_emulated_and_never_cuda(run: Run) -> None:
    assert run.report is not None
    assert run.report.device == "emulated"
    assert any("emulated" in note for note in run.report.notes)
    verdicts = [(result.verdict.reason, result.verdict.also, result.yielded) for result in run.report.results]
    assert "cuda" not in str(verdicts)


@pytest.mark.parametrize("case", list(_RACES))
def test_a_race_shows_on_every_run(run: Run, case: str) -> None:
    verdict = run.result(case).verdict
    assert verdict.kind == _RACES[case][0], verdict
    assert _RACES[case][1] in verdict.reason


def test_corrupted_training_weights_are_named(run: Run) -> None:
    also = " ".join(run.result("fsdp2/param/staged/uneven/nonblocking/weights_info").verdict.also)
    assert "the next training step would start from other weights" in also


@pytest.mark.parametrize("entry", _REPRODUCED, ids=lambda entry: entry.id)
def test_the_case_of_an_entry_shows_it(request: pytest.FixtureRequest, entry: KnownFailure) -> None:
    if not entry.shows_on(torch.__version__):
        context = RunContext(torch=torch.__version__, device=entry.evidence_device or "emulated")
        assert list_expected_failures(_case(entry.evidence), context)[:1] != [entry]
        return
    if _of_four_ranks(entry) or entry.evidence_device == "cpu":
        shown: Run = request.getfixturevalue("on_four_ranks" if _of_four_ranks(entry) else "on_the_cpu")
        result = shown.result(entry.evidence)
    else:
        result = _find_result(request, entry.evidence)
    assert (result.verdict.kind, result.known) == (entry.verdict, entry.id), result.verdict


def test_emulation_is_the_default_and_shows_races_by_late_completion_alone(
    tmp_path: pathlib.Path,
) -> None:
    needs_emulation()
    # torch counts the eight emulated devices of this process, from which the ranks of a probe would be chosen.
    options = ("--no-late-completion", "--expect", "known", "--nproc", "2")
    run = _probe_cases(tmp_path, *_RACES, options=options, device="auto", env=_without_gpus())
    assert run.code == 0, run.stderr
    assert run.report is not None
    assert run.report.device == "emulated"
    assert {result.verdict.kind for result in run.report.results} == {"ok"}
    assert any("Late completion is off" in note for note in run.report.notes)


def test_a_method_that_does_not_fit_is_out_of_memory(tmp_path: pathlib.Path) -> None:
    """2 MiB hold a training step of the small model, and not ten copies of its full tensors."""
    run = _probe_cases(
        tmp_path, "fsdp2/none/unstaged/fresh/faults.hungry:collects_ten_times", options=("--device-memory", "2MiB")
    )
    result = run.result("collects_ten_times")
    assert result.verdict.kind == "oom"
    assert "OutOfMemoryError: emulated out of memory" in result.verdict.reason
    assert "total capacity of 2.00 MiB" in result.verdict.reason
    assert {report.record.stage for report in result.ranks if report.record} == {"extract"}


def test_without_a_compiler_the_refusal_is_one_sentence_and_names_the_cpu(tmp_path: pathlib.Path) -> None:
    env = _without_gpus() | {"FSDP_DOCTOR_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = forked_doctor("probe", "--case", "fsdp2/none/unstaged/weights_info", env=env)
    said = [line for line in done.stderr.splitlines() if line.startswith("fsdp-doctor:")]
    assert done.code == 3, done.stderr
    assert len(said) == 1, done.stderr
    for part in ("no accelerator", "CXX=no-such-compiler", "--device cpu"):
        assert part in said[0]
    assert "Traceback" not in done.stderr


def _without_gpus() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""}
