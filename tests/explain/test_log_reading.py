"""Logs in the forms in which they come: boxes, joined lines, lost headers, other scripts, prose."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, cause_of, explained

_FSDP = "/env/torch/distributed/fsdp"


@pytest.mark.parametrize("lid", [True, False], ids=["whole", "without its lid"])
def test_a_traceback_in_a_box_is_read_though_its_paths_are_broken(tmp_path: pathlib.Path, lid: bool) -> None:
    explanation = explained(
        tmp_path,
        *(["[rank2]: ╭───────── Traceback (most recent call last) ─────────╮"] if lid else []),
        "[rank2]: │ /app/train.py:12 in main                            │",
        "[rank2]: │                                                      │",
        "[rank2]: │ ❱  12 │   raise ValueError('not this one')            │",
        "[rank2]: │ /app/venv/lib/python3.11/site-packages/torch/distri │",
        "[rank2]: │ buted/fsdp/_optim_utils.py:461                       │",
        "[rank2]: │ in _flatten_optim_state_dict                         │",
        "[rank2]: ╰──────────────────────────────────────────────────────╯",
        "[rank2]: KeyError: 'state'",
    )
    path = "/app/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_optim_utils.py"
    assert cause_of(explanation).text == "KeyError: 'state'"
    assert cause_of(explanation).frames == [
        'File "/app/train.py", line 12, in main',
        f'File "{path}", line 461, in _flatten_optim_state_dict',
    ]
    assert explanation.entry is not None
    assert explanation.entry.id == "optimizer-state-names-do-not-match"


def test_a_table_in_a_box_is_no_traceback(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, "╭─ errors ─╮", "│ rror  │ 3 │", "╰──────────╯", "│ a.py  │ 4 │")
    assert explanation.showing == "nothing"


def test_frames_without_a_header_and_a_bare_exception_are_a_traceback(tmp_path: pathlib.Path) -> None:
    explanation = explained(
        tmp_path,
        "my torch is 2.7.1",
        f'File "{_FSDP}/_optim_utils.py", line 1382, in _convert_all_state_info',
        "assert dtype == info.dtype",
        "AssertionError",
        "",
        "can you help?",
    )
    assert (cause_of(explanation).text, explanation.grade) == ("AssertionError", "known")


def test_lines_that_were_joined_are_taken_apart(tmp_path: pathlib.Path) -> None:
    stamp = "2025-10-31 03:11:02,476 - trainer - INFO - [rank4]: "
    joint = " " * 20 + stamp
    loader = "/env/torch/distributed/checkpoint/state_dict_loader.py"
    joined = joint.join(
        [f'  File "{loader}", line 250, in local_step', "    assert metadata is not None", "AssertionError"]
    )
    explanation = explained(tmp_path, f"{stamp}{joined}", "10/20 [00:05<00:05, 2.8s/it][rank5]: ValueError: late")
    assert explanation.cause is not None
    assert (explanation.cause.sources, explanation.cause.first.text) == ({"rank 4"}, "AssertionError")
    assert [other.source for other in explanation.others] == ["rank 5"]


@pytest.mark.parametrize(
    "line",
    [
        "训练时报错RuntimeError: no such thing",
        "エラーRuntimeError\uff1ano such thing",
        '{"error": "RuntimeError: no such thing"}',
    ],
    ids=["after Chinese", "with a wide colon", "in JSON"],
)
def test_an_exceptions_name_is_found_wherever_it_begins(tmp_path: pathlib.Path, line: str) -> None:
    assert cause_of(explained(tmp_path, line)).text.startswith("RuntimeError: no such thing")


@pytest.mark.parametrize(
    "line",
    [
        '    raise RuntimeError("Attempted to set the storage of a tensor on device")',
        'raise AssertionError("Torch not compiled with CUDA enabled")',
        "the section on CUDA and memory of the handbook",
        "except ValueError: # No backend type associated with device type cpu",
        "loss/MeanSquaredError: 0.123",
    ],
)
def test_source_lines_and_prose_are_no_failure(tmp_path: pathlib.Path, line: str) -> None:
    assert explained(tmp_path, "step 1 rror", line).showing == "nothing"


def test_lines_of_one_length_that_are_no_broken_line_stay_apart(tmp_path: pathlib.Path) -> None:
    bar = [f"{percent}% done, {percent} of 99 files, loss 0.{percent}{'.' * 40}" for percent in range(10, 99)]
    explanation = explained(tmp_path, *bar, "ValueError: no such thing")
    assert (cause_of(explanation).text, cause_of(explanation).line) == ("ValueError: no such thing", 90)


def test_a_message_in_prose_is_not_known_for_certain(tmp_path: pathlib.Path) -> None:
    explanation = explained(
        tmp_path, "it says: FSDP parameters should be materialized on CPU when enabling CPU offloading"
    )
    assert (explanation.grade, explanation.matches[0].entry.id) == ("likely", "fsdp2-params-not-on-cpu-at-lazy-init")


def test_a_drivers_traceback_continues_although_its_exception_has_another_prefix(
    tmp_path: pathlib.Path,
) -> None:
    explanation = explained(
        tmp_path,
        BEGIN,
        '  File "/env/ray/worker.py", line 919, in get_objects',
        "(WorkerDict pid=71) " + BEGIN,
        '(WorkerDict pid=71)   File "/app/fsdp_workers.py", line 5, in save',
        "(WorkerDict pid=71) AssertionError: Expects tensor to be on the compute device cuda:0, was on cpu",
        "ray.exceptions.RayTaskError(AssertionError): ray::main_task() (pid=70, ip=10.0.0.5)",
        '  File "/app/main.py", line 3, in main_task',
        "AssertionError: Expects tensor to be on the compute device cuda:0, was on cpu",
    )
    assert (explanation.showing, explanation.grade, explanation.others) == ("failure", "known", ())


def test_a_whole_exception_comes_before_a_traceback_that_was_cut_off(tmp_path: pathlib.Path) -> None:
    cut = [BEGIN, '  File "/app/a.py", line 1, in f']
    explanation = explained(tmp_path, *(f"[rank0]: {line}" for line in cut), "[rank1]: ValueError: whole")
    assert (cause_of(explanation).text, explanation.others) == ("ValueError: whole", ())
    assert explained(tmp_path, *cut).showing == "cut"


def test_a_fatal_error_of_the_interpreter_is_a_failure_with_its_stack(tmp_path: pathlib.Path) -> None:
    explanation = explained(
        tmp_path,
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        f'  File "{_FSDP}/_state_dict_utils.py", line 341 in _full_post_state_dict_hook',
        '  File "/app/train.py", line 9 in save',
    )
    assert explanation.showing == "failure"
    assert "train.py" in cause_of(explanation).frames[0]
    assert "_state_dict_utils.py" in cause_of(explanation).frames[1]


@pytest.mark.parametrize(
    "line",
    [
        "E1121 12:34:56.000 1 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
        "[W1110 10:14:58.14 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=112): got 0 bytes",
    ],
    ids=["torchrun", "Ray", "c10d"],
)
def test_a_message_that_a_process_is_gone_counts_as_a_consequence(tmp_path: pathlib.Path, line: str) -> None:
    assert explained(tmp_path, "step 1", line).showing == "consequences"


def test_what_cpp_says_of_its_end_is_a_failure(tmp_path: pathlib.Path) -> None:
    explanation = explained(
        tmp_path,
        "terminate called after throwing an instance of 'c10::CUDAError'",
        "  what():  CUDA error: an illegal memory access was encountered",
    )
    assert (explanation.showing, explanation.about) == ("failure", "a kernel on the device")


_STEP = [
    '  File "/app/fit.py", line 9, in main',
    f'  File "{_FSDP}/_optim_utils.py", line 461, in _flatten_optim_state_dict',
]


@pytest.mark.parametrize(
    "lines",
    [
        ["KeyError: 'state'", *_STEP],
        ["KeyError: 'state'", *reversed(_STEP), BEGIN],
        ["KeyError: 'state'", _STEP[1], "    states[key]", _STEP[0], "    save()"],
    ],
    ids=["outermost first", "the newest line first", "with code"],
)
def test_frames_below_the_message_are_its_traceback(tmp_path: pathlib.Path, lines: list[str]) -> None:
    explanation = explained(tmp_path, *lines)
    assert cause_of(explanation).frames == [frame.strip() for frame in _STEP]
    assert explanation.entry is not None


def test_frames_between_two_exceptions_are_those_of_the_second(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, "ValueError: handled", *_STEP, "KeyError: 'state'")
    assert (cause_of(explanation).type, len(cause_of(explanation).frames)) == ("KeyError", 2)


@pytest.mark.parametrize(
    "line",
    [
        '{"rank": 3, "error": {"stack": "Traceback (most recent call last):\\n  File \\"/app/a.py\\", line 3, in f\\nKeyError: 7"}}',  # noqa: E501
        """ts=1 rank=3 error='Traceback (most recent call last):\\n  File "/app/a.py", line 3, in f\\nKeyError: 7' end""",  # noqa: E501
        '[rank3]: {"e": "{\\"x\\": \\"Traceback (most recent call last):\\\\n  File \\\\\\"/app/a.py\\\\\\", line 3, in f\\\\nKeyError: 7\\"}"}',  # noqa: E501
    ],
    ids=["nested", "logfmt", "twice escaped"],
)
def test_a_traceback_in_one_line_has_its_frames_and_its_rank(tmp_path: pathlib.Path, line: str) -> None:
    raised = cause_of(explained(tmp_path, "step 1", line))
    assert (raised.text, raised.source, raised.line) == ("KeyError: 7", "rank 3", 2)
    assert raised.frames == ['File "/app/a.py", line 3, in f']
