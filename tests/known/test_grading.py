"""Tests how sure an entry is: by its frames, by what it needs to be true, and by the version of torch."""

from __future__ import annotations

import pytest

from fsdp_doctor.known.clues import CLUES, LogClues
from fsdp_doctor.known.grading import Evidence, match_evidence

_NO_BACKEND = "RuntimeError: No backend type associated with device type cpu"
_STORAGE = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device "cuda:0"'
)
_MEMORY = (
    "ValueError: Free memory on device cuda:0 (31.2/79.1 GiB) on startup is less than desired GPU memory utilization"
)
_FULL_TENSOR = 'File "/env/torch/distributed/tensor/_api.py", line 586, in full_tensor'
_MATERIALIZED = "RuntimeError: FSDP parameters should be materialized on CPU when enabling CPU offloading."
_OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
_ENGINE = 'File "/env/site-packages/vllm/v1/worker.py", line 3, in init_device'
_DDP = 'File "/env/lightning/strategies/ddp.py", line 342, in reduce'


def _grade(message: str, traceback: str = "", **evidence: object) -> str | None:
    matches = match_evidence(Evidence(message=message, traceback=traceback, **evidence))  # type: ignore[arg-type]
    return matches[0].grade if matches else None


@pytest.mark.parametrize(
    ("message", "traceback", "log", "grade"),
    [
        (_NO_BACKEND, _FULL_TENSOR, (), "known"),
        (_NO_BACKEND, _DDP, (), None),
        (_NO_BACKEND, _DDP, ("fsdp",), "possible"),
        (_NO_BACKEND, "", (), "possible"),
        (_STORAGE, 'File "/env/torch/nn/modules/module.py", line 2256, in state_dict', ("fsdp",), "known"),
        (_STORAGE, 'File "/env/torch/serialization.py", line 3, in load', (), None),
        (_MEMORY, _ENGINE, (), "possible"),
        (_MEMORY, _ENGINE, ("fsdp", "cpu offload"), "likely"),
        (_MEMORY, _ENGINE, ("fsdp", "cpu offload", "unsharded group"), "known"),
        (_MEMORY, "", ("fsdp", "cpu offload", "unsharded group"), "possible"),
        (_MATERIALIZED, "", (), "likely"),
        (_OUT_OF_MEMORY, 'File "/env/transformers/llama.py", line 3, in forward', ("fsdp",), None),
    ],
)
def test_a_message_of_many_programs_is_known_only_with_signs_of_fsdp(
    message: str, traceback: str, log: tuple[str, ...], grade: str | None
) -> None:
    assert _grade(message, traceback, log=log) == grade


def test_what_would_make_it_sure_is_asked() -> None:
    (match,) = match_evidence(Evidence(message=_MEMORY, traceback=_ENGINE, log=("fsdp", "cpu offload")))
    assert match.open == (CLUES["unsharded group"].ask,)


def test_another_version_of_torch_than_the_entry_needs_speaks_against_it() -> None:
    traceback = 'File "/env/torch/distributed/fsdp/x.py", line 1, in state_dict'
    assert _grade(_STORAGE, traceback, torch="2.10.0") == "known"
    assert _grade(_STORAGE, traceback, torch="2.4") == "possible"


@pytest.mark.parametrize(
    ("operation", "function", "entry"),
    [
        ("copy_.default", "load_weights", "mixed-tensor-and-dtensor"),
        ("mm.default", "forward", "dtensor-mixed-in-forward"),
        ("mul.Tensor", "recompute_fn", "dtensor-mixed-in-recompute"),
        ("add_.Tensor", "merge_adapter", "dtensor-mixed-in-lora-merge"),
        ("_foreach_mul_.Scalar", "clip_grad_norm_", "dtensor-mixed-in-optimizer"),
    ],
)
def test_a_mix_of_tensors_is_told_by_where_it_was_raised(operation: str, function: str, entry: str) -> None:
    mixed = "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    message = f"RuntimeError: aten.{operation}: {mixed}"
    dispatch = 'File "/env/torch/distributed/tensor/_dispatch.py", line 488, in dispatch'
    traceback = f'File "/app/a.py", line 3, in {function}\n{dispatch}'
    matches = match_evidence(Evidence(message=message, traceback=traceback))
    assert [match.entry.id for match in matches if match.grade == "known"] == [entry]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("actor.fsdp_config.param_offload=True", "cpu offload"),
        ("strategy=fsdp2", "dtensor"),
        ("distributed_type: FSDP", "fsdp"),
        ("fsdp_size: 1", "unsharded group"),
        ("AdamW8bit", "low-bit optimizer"),
    ],
)
def test_a_log_shows_facts_about_its_run(text: str, fact: str) -> None:
    clues = LogClues()
    clues.read("x" * 10_000 + "\n" + text + "\n")
    assert fact in clues.shown


@pytest.mark.parametrize(
    "text", ["fsdp=[], fsdp_config={'xla': False}", "fsdp: null", "param_offload=False", "fsdp_size=16"]
)
def test_settings_that_are_off_show_nothing(text: str) -> None:
    clues = LogClues()
    clues.read(text)
    assert clues.shown == set()


@pytest.mark.parametrize(
    "text",
    ["PyTorch version: 2.7.1+cu128", "torch==2.7.1", "my torch is 2.7.1", "- PyTorch version (GPU?): 2.7.1 (True)"],
)
def test_the_version_of_torch_is_taken_from_the_log(text: str) -> None:
    clues = LogClues()
    clues.read(text)
    assert clues.torch == "2.7.1"
