"""Certainty of ``explain`` about a message follows from the place that raised it and from what was being handled."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, DURING, UNSHARD, entry_of, explained


@pytest.mark.parametrize(
    "raised", ["AssertionError", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
)
def test_a_common_message_has_no_entry_if_its_traceback_leads_elsewhere(tmp_path: pathlib.Path, raised: str) -> None:
    lines = [BEGIN, '  File "/opt/train.py", line 3, in attend', "    x = y", raised]
    assert explained(tmp_path, *["strategy: fsdp", *lines]).matches == ()
    assert explained(tmp_path, *lines).matches == ()
    assert explained(tmp_path, "strategy: fsdp", raised).grade == "possible"


def _ending_in(file: str, line: str) -> list[str]:
    """A traceback whose innermost frame is that line of that file."""
    above = ['  File "/home/me/train.py", line 30, in <module>', "    sync(FSDP(model))"]
    return [BEGIN, *above, f'  File "{file}", line 12, in state_dict', f"    {line}", UNSHARD.format(0)]


_OWN_RAISE = _ending_in("/home/me/train.py", f'raise AssertionError("{UNSHARD.format(0)}")')
_TORCHS_RAISE = _ending_in("/env/torch/distributed/utils.py", "raise AssertionError(s)")


@pytest.mark.parametrize("line", ["raise AssertionError(f'Expects {text}')", "assert tensor.device == device, text"])
@pytest.mark.parametrize("file", ["/home/me/train.py", "C:\\jobs\\train.py", "train.py"])
def test_an_error_raised_by_a_users_script_is_at_most_possible(tmp_path: pathlib.Path, file: str, line: str) -> None:
    explanation = explained(tmp_path, *_ending_in(file, line))
    assert explanation.grade == "possible"
    assert file in "".join(explanation.matches[0].against)


@pytest.mark.parametrize(
    "lines",
    [
        _TORCHS_RAISE,
        _ending_in("C:\\Python312\\Lib\\concurrent\\futures\\_base.py", "raise self._exception"),
        _ending_in("/workspace/verl/verl/workers/fsdp_workers.py", "raise error.with_traceback(None)"),
        _ending_in("/home/me/train.py", "handle.unshard()"),
        [line for line in _OWN_RAISE if not line.startswith("    raise")],
        [*_TORCHS_RAISE, "", DURING, "", *_OWN_RAISE],
        [*_OWN_RAISE, *_TORCHS_RAISE],
    ],
    ids=["torch", "python", "framework", "call", "no source", "raised again", "another rank's"],
)
def test_what_a_script_only_calls_or_passes_on_is_known(tmp_path: pathlib.Path, lines: list[str]) -> None:
    assert entry_of(explained(tmp_path, *lines)) == "fsdp1-manual-offload-then-state-dict"


_WORDS = UNSHARD.format(0).removeprefix("AssertionError: ")
_IN_FSDP = "/env/lib/python3.12/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("/env/lib/python3.12/site-packages/mine/a.py", f'raise AssertionError("{_WORDS}")'),
        ("/env/lib/python3.12/site-packages/mine/a.py", "raise AssertionError(text)"),
        (
            "/env/lib/python3.12/site-packages/mine/a.py",
            'raise AssertionError(f"Expects tensor to be on the compute device {one}, was on {other}")',
        ),
    ],
    ids=["words", "a variable", "f-string"],
)
def test_what_another_package_raises_is_no_more_than_possible(tmp_path: pathlib.Path, file: str, line: str) -> None:
    assert explained(tmp_path, *_ending_in(file, line)).grade == "possible"


def test_a_message_of_a_framework_that_the_entry_names_is_known(tmp_path: pathlib.Path) -> None:
    file = "/env/lib/python3.12/site-packages/verl/utils/fsdp_utils.py"
    explanation = explained(tmp_path, *_ending_in(file, f'raise AssertionError("{_WORDS}")'))
    assert entry_of(explanation) == "fsdp1-manual-offload-then-state-dict"


def _in_fsdp(raised: str) -> list[str]:
    return [BEGIN, f'  File "{_IN_FSDP}", line 530, in foreach_reduce', "    reduce_output = allocate(", raised]


def test_what_fails_while_a_full_memory_is_handled_is_not_its_cause(tmp_path: pathlib.Path) -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.09 GiB."
    then = _ending_in("/env/torch/distributed/distributed_c10d.py", "work = group.allgather(tensors)")
    then[-1] = "RuntimeError: No backend type associated with device type cpu"
    explanation = explained(tmp_path, *[*_in_fsdp(full), "", DURING, "", *then])
    assert explanation.cause is not None
    assert explanation.cause.first.type == "OutOfMemoryError"


def test_what_fails_while_an_import_error_is_handled_is_the_cause(tmp_path: pathlib.Path) -> None:
    imported = [BEGIN, '  File "/home/me/a.py", line 1, in f', "    import b", "ImportError: No module named b"]
    explanation = explained(tmp_path, *[*imported, "", DURING, "", *_in_fsdp("RuntimeError: no such thing")])
    assert explanation.cause is not None
    assert explanation.cause.first.type == "RuntimeError"


@pytest.mark.parametrize(
    ("raised", "what"),
    [
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "a kernel on the device"),
        ("OSError: [Errno 28] No space left on device", "a disk that is full"),
    ],
)
def test_what_is_raised_wherever_the_program_is_is_no_failure_of_fsdps(
    tmp_path: pathlib.Path, raised: str, what: str
) -> None:
    explanation = explained(tmp_path, *_in_fsdp(raised))
    assert (explanation.about_fsdp, explanation.foreign or explanation.about) == (False, what)
    assert explained(tmp_path, *_in_fsdp("RuntimeError: CUDA error: illegal memory access")).about_fsdp


def test_the_cause_of_a_failed_checkpoint_is_the_error_on_the_rank(tmp_path: pathlib.Path) -> None:
    carrier = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])"
    saver = '  File "/env/torch/distributed/checkpoint/utils.py", line 252, in all_reduce'
    inner = '  File "/env/torch/distributed/checkpoint/filesystem.py", line 420, in _write_files_from_queue'
    lines = [BEGIN, saver, "    raise final_result", carrier, f"{BEGIN}: (RANK 1)", inner, "    stream.write(data)"]
    explanation = explained(tmp_path, *[*lines, "OSError: [Errno 28] No space left on device"])
    assert explanation.cause is not None
    assert explanation.cause.first.type == "OSError"
    assert explanation.consequences == {"a distributed checkpoint failed on a rank": 1}


@pytest.mark.parametrize(
    ("place", "grade"),
    [
        ('_fully_shard/_fsdp_param.py", line 700 in all_gather_inputs', None),
        ('_unshard_param_utils.py", line 190 in _unshard_fsdp_state_params', "known"),
    ],
)
def test_a_segmentation_fault_is_known_only_at_its_known_places(
    tmp_path: pathlib.Path, place: str, grade: str | None
) -> None:
    stack = ["Thread 0x00007f1 (most recent call first):", f'  File "/env/torch/distributed/fsdp/{place}']
    assert explained(tmp_path, *["Fatal Python error: Segmentation fault", "", *stack]).grade == grade


_SITE = "/env/lib/python3.12/site-packages"
_FSDP = f"{_SITE}/torch/distributed/fsdp"
_CONTRADICTED = {
    # NVIDIA/TransformerEngine#2951: quantized weights, and no safetensors.
    ("safetensors-of-a-dtensor", "quantized-shard-lost-its-storage"): [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/app/fully_shard.py", line 212, in main',
        "[rank0]:     model.load_state_dict(state_dict)",
        f'[rank0]:   File "{_SITE}/torch/nn/modules/module.py", line 2629, in load_state_dict',
        f'[rank0]:   File "{_FSDP}/_fully_shard/_fsdp_param.py", line 890, in reset_sharded_param',
        "[rank0]:     same_local_tensor = self._sharded_param_data.untyped_storage().data_ptr() == (",
        "[rank0]: RuntimeError: Attempted to access the data pointer on an invalid python storage.",
    ],
    # EvolvingLMMs-Lab/lmms-engine#155: a tool that merges shards.
    ("assign-of-full-tensors", ""): [
        "Traceback (most recent call last):",
        '  File "/app/lmms_engine/merger/fsdp2.py", line 88, in merge',
        "    shards = [state[name]._local_tensor for state in states]  # FSDP2",
        "AttributeError: 'Tensor' object has no attribute '_local_tensor'",
    ],
    # pytorch/pytorch#186938: torch's own code, on an XPU.
    ("hard-coded-cuda-staging", "sharded-tensor-asks-for-cuda"): [
        "[rank3]: Traceback (most recent call last):",
        '[rank3]:   File "/app/train.py", line 51, in resume',
        "[rank3]:     FSDP.optim_state_dict_to_load(model, optimizer, state)",
        f'[rank3]:   File "{_SITE}/torch/distributed/_shard/sharded_tensor/api.py", line 54, in tensor_device',
        "[rank3]:     dev = torch.device(torch.cuda.current_device())",
        f'[rank3]:   File "{_SITE}/torch/cuda/__init__.py", line 403, in _lazy_init',
        "[rank3]: AssertionError: Torch not compiled with CUDA enabled",
    ],
    # LeapLabTHU/JustGRPO#1: a forward, and no summon_full_params.
    ("fsdp1-summon-before-root-init", "fsdp1-inner-unit-became-the-root"): [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/app/grpo.py", line 40, in logprob_loss',
        "[rank0]:     logits = model(x).logits / temperature",
        f'[rank0]:   File "{_FSDP}/fully_sharded_data_parallel.py", line 845, in forward',
        f'[rank0]:   File "{_FSDP}/_runtime_utils.py", line 556, in _root_pre_forward',
        f'[rank0]:   File "{_SITE}/torch/distributed/utils.py", line 166, in _p_assert',
        "[rank0]: AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or should have been "
        "set to `False`",
    ],
    # pytorch/pytorch#151223: one GPU.
    ("fsdp1-writeback-of-another-shape", "fsdp1-writeback-on-one-rank"): [
        "UserWarning: FSDP is switching to use `NO_SHARD` instead of FULL_SHARD since the world size is 1.",
        "[rank0]: Traceback (most recent call last):",
        f'[rank0]:   File "{_FSDP}/_flat_param.py", line 2240, in _writeback_tensor',
        "[rank0]:     raise RuntimeError(",
        "[rank0]: RuntimeError: Cannot writeback when the parameter shape changes",
        "[rank0]: Expects torch.Size([517996544]) but got torch.Size([126464, 4096])",
    ],
}


@pytest.mark.parametrize(("entry", "other"), _CONTRADICTED)
def test_an_entry_is_not_known_where_the_log_contradicts_it(tmp_path: pathlib.Path, entry: str, other: str) -> None:
    explanation = explained(tmp_path, *_CONTRADICTED[entry, other])
    assert entry_of(explanation) == other
    assert all(match.grade == "possible" for match in explanation.matches if match.entry.id == entry)
