"""How sure ``explain`` is of a message follows from where it was raised, and while what else was being handled."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, DURING, UNSHARD, entry_of, explained


@pytest.mark.parametrize(
    "raised", ["AssertionError", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
)
def test_a_message_that_anything_can_raise_is_no_more_than_possible(tmp_path: pathlib.Path, raised: str) -> None:
    lines = [BEGIN, '  File "/opt/train.py", line 3, in load', "    x = y", raised]
    assert explained(tmp_path, *["strategy: fsdp", *lines]).grade == "possible"
    assert explained(tmp_path, *lines).matches == ()


def _ending_in(file: str, line: str) -> list[str]:
    """A traceback whose innermost frame is that line of that file."""
    above = ['  File "/home/me/train.py", line 30, in <module>', "    sync(FSDP(model))"]
    return [BEGIN, *above, f'  File "{file}", line 12, in state_dict', f"    {line}", UNSHARD.format(0)]


_OWN_RAISE = _ending_in("/home/me/train.py", f'raise AssertionError("{UNSHARD.format(0)}")')
_TORCHS_RAISE = _ending_in("/env/torch/distributed/utils.py", "raise AssertionError(s)")


@pytest.mark.parametrize("line", ["raise AssertionError(f'Expects {text}')", "assert tensor.device == device, text"])
@pytest.mark.parametrize("file", ["/home/me/train.py", "C:\\jobs\\train.py", "train.py"])
def test_what_a_script_raises_in_its_own_line_is_no_more_than_possible(
    tmp_path: pathlib.Path, file: str, line: str
) -> None:
    explanation = explained(tmp_path, *_ending_in(file, line))
    assert explanation.grade == "possible"
    assert f"does {file} pass on an error of torch's?" in "".join(explanation.matches[0].open)


@pytest.mark.parametrize(
    "lines",
    [
        _TORCHS_RAISE,
        _ending_in("/env/lib/python3.12/site-packages/mine/a.py", "raise AssertionError(text)"),
        _ending_in("C:\\Python312\\Lib\\concurrent\\futures\\_base.py", "raise self._exception"),
        _ending_in("/workspace/verl/verl/workers/fsdp_workers.py", "raise error.with_traceback(None)"),
        _ending_in("/home/me/train.py", "handle.unshard()"),
        [line for line in _OWN_RAISE if not line.startswith("    raise")],
        [*_TORCHS_RAISE, "", DURING, "", *_OWN_RAISE],
        [*_OWN_RAISE, *_TORCHS_RAISE],
    ],
    ids=["torch", "package", "python", "framework", "call", "no source", "raised again", "another rank's"],
)
def test_what_a_script_only_calls_or_passes_on_is_known(tmp_path: pathlib.Path, lines: list[str]) -> None:
    assert entry_of(explained(tmp_path, *lines)) == "fsdp1-manual-offload-then-state-dict"


_WORDS = UNSHARD.format(0).removeprefix("AssertionError: ")
_IN_FSDP = "/env/lib/python3.12/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("/env/lib/python3.12/site-packages/mine/a.py", f'raise AssertionError("{_WORDS}")'),
        (
            "/env/lib/python3.12/site-packages/mine/a.py",
            'raise AssertionError(f"Expects tensor to be on the compute device {one}, was on {other}")',
        ),
    ],
    ids=["words", "f-string"],
)
def test_what_a_package_raises_in_words_of_its_own_is_no_more_than_possible(
    tmp_path: pathlib.Path, file: str, line: str
) -> None:
    assert explained(tmp_path, *_ending_in(file, line)).grade == "possible"


def test_what_a_framework_of_the_entry_raises_in_words_of_its_own_is_known(tmp_path: pathlib.Path) -> None:
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
        ("OSError: [Errno 28] No space left on device", "a file, or the right to use something"),
    ],
)
def test_what_is_raised_wherever_the_program_is_is_no_failure_of_fsdps(
    tmp_path: pathlib.Path, raised: str, what: str
) -> None:
    explanation = explained(tmp_path, *_in_fsdp(raised))
    assert (explanation.about_fsdp, explanation.foreign) == (False, what)
    assert explained(tmp_path, *_in_fsdp("RuntimeError: CUDA error: illegal memory access")).about_fsdp


def test_a_checkpoint_that_failed_on_a_rank_is_not_the_cause_of_what_failed_there(tmp_path: pathlib.Path) -> None:
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
        ('_fully_shard/_fsdp_param.py", line 700 in all_gather_inputs', "possible"),
        ('_unshard_param_utils.py", line 190 in _unshard_fsdp_state_params', "known"),
    ],
)
def test_a_segmentation_fault_is_known_only_where_it_is_known_to_come_from(
    tmp_path: pathlib.Path, place: str, grade: str
) -> None:
    stack = ["Thread 0x00007f1 (most recent call first):", f'  File "/env/torch/distributed/fsdp/{place}']
    assert explained(tmp_path, *["Fatal Python error: Segmentation fault", "", *stack]).grade == grade
