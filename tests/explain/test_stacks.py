"""The stacks of ranks that hang, of py-spy and faulthandler, and one message that was raised at two places."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import pytest
from support.written_logs import BEGIN, entry_of, explained, written

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import explain, text

_GATHERING = (
    ("wait_tensor", "torch/distributed/_functional_collectives.py", 142),
    ("DTensor.redistribute", "torch/distributed/tensor/_api.py", 731),
    ("DTensor.full_tensor", "torch/distributed/tensor/_api.py", 774),
    ("<dictcomp>", "train.py", 12),
    ("save", "train.py", 12),
)
_IN_BARRIER = (
    ("barrier", "torch/distributed/distributed_c10d.py", 5356),
    ("_exception_logger.<locals>.wrapper", "torch/distributed/c10d_logger.py", 83),
    ("<module>", "train.py", 14),
)
_READING = (("Event.wait", "threading.py", 629), ("read_batch", "data.py", 5), ("<module>", "train.py", 9))
_OF_TORCHRUN = (("SimpleElasticAgent._invoke_run", "torch/distributed/elastic/agent/server/api.py", 923),)


def _dump(pid: int, frames: Sequence[tuple[str, str, int]], *, threads: Sequence[str] = ()) -> list[str]:
    """Writes what ``py-spy dump`` writes of a process, with the main thread's stack and other threads."""
    return [
        f"Process {pid}: /env/bin/python -u train.py",
        "Python v3.11.7 (/env/bin/python3.11)",
        "",
        f'Thread {pid} (idle): "MainThread"',
        *(f"    {function} ({file}:{line})" for function, file, line in frames),
        *threads,
    ]


def _said(tmp_path: pathlib.Path, *lines: str) -> str:
    explanation = explained(tmp_path, *lines)
    assert explanation.showing == "hang"
    return text.render_text(explanation, 10_000)


def test_stacks_of_py_spy_say_which_process_waits_where(tmp_path: pathlib.Path) -> None:
    said = _said(tmp_path, *_dump(76, _GATHERING), *_dump(77, _IN_BARRIER))
    assert "Process 76 waits in full_tensor, process 77 in barrier: the ranks are in different calls." in said
    assert 'process 76 called it at File "train.py", line 12, in <dictcomp>' in said
    assert "Known: rank0-only-gather-deadlock" in said


def test_a_rank_outside_of_torch_distributed_is_named(tmp_path: pathlib.Path) -> None:
    said = _said(tmp_path, *_dump(76, _IN_BARRIER), *_dump(77, _READING), *_dump(75, _OF_TORCHRUN))
    assert "Process 76 waits in barrier; process 77 is in wait, outside of torch.distributed." in said
    assert 'process 77 is there through File "data.py", line 5, in read_batch' in said
    assert "75" not in said


def test_one_stack_alone_leads_to_those_of_the_other_ranks(tmp_path: pathlib.Path) -> None:
    said = _said(tmp_path, *_dump(76, _IN_BARRIER))
    assert "A rank whose stack is not here has not reached this call" in said
    assert all(f"  - {way}" in said for way in ("while it hangs, `py-spy dump --pid PID", "with NCCL, start it with"))


def test_the_name_of_a_file_says_the_rank_of_its_stack(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / f"rank{rank}.txt" for rank in (0, 3)]
    for path, frames in zip(paths, (_IN_BARRIER, _IN_BARRIER), strict=True):
        path.write_text("\n".join(_dump(700 + len(path.name), frames)), encoding="utf-8")
    explanation = explain(paths)
    assert explanation.hang is not None
    assert [(each.rank, each.is_process) for each in explanation.hang.waiting] == [(3, False)]
    paths[1].write_text("\n".join(_dump(99, _IN_BARRIER)), encoding="utf-8")
    assert "Ranks 0 and 3 wait in barrier." in text.render_text(explain(paths), 10_000)


def test_torchruns_summary_says_the_rank_of_a_process(tmp_path: pathlib.Path) -> None:
    summary = ["  rank      : 4 (local_rank: 0)", "  exitcode  : -15 (pid: 76)  (SIGTERM)"]
    assert "Rank 4 waits in barrier." in _said(tmp_path, *summary, *_dump(76, _IN_BARRIER))


def test_the_thread_that_runs_a_backward_is_the_one_that_waits(tmp_path: pathlib.Path) -> None:
    backward = (("_engine_run_backward", "torch/autograd/graph.py", 824), ("<module>", "train.py", 30))
    hook = (("reduce_scatter_single", "torch/distributed/distributed_c10d.py", 4500), ("hook", "fsdp.py", 3))
    thread = ['Thread 0x7F12 (idle): "Dummy-1"', *(f"    {name} ({file}:{line})" for name, file, line in hook)]
    assert "Process 76 waits in reduce_scatter_single." in _said(tmp_path, *_dump(76, backward, threads=thread))


@pytest.mark.parametrize("times", [1, 2])
def test_py_spys_json_is_read_like_its_text(tmp_path: pathlib.Path, times: int) -> None:
    def convert(pid: int, frames: Sequence[tuple[str, str, int]]) -> str:
        listed = [{"name": name, "filename": f"/env/{file}", "line": line} for name, file, line in frames]
        return json.dumps([{"pid": pid, "thread_name": "MainThread", "frames": listed}], indent=1)

    path = tmp_path / "stacks.json"
    path.write_text((convert(76, _GATHERING) + "\n" + convert(77, _IN_BARRIER) + "\n") * times, encoding="utf-8")
    assert "Process 76 waits in full_tensor, process 77 in barrier" in text.render_text(explain([path]), 10_000)
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    with pytest.raises(UsageError, match="not a complete JSON document"):
        explain([path])


def test_stacks_of_faulthandler_with_ranks_are_read(tmp_path: pathlib.Path) -> None:
    lines = []
    for rank, frames in enumerate((_GATHERING, _IN_BARRIER)):
        lines += [f"[rank{rank}]: Timeout (0:00:30)!", f"[rank{rank}]: Thread 0x00007f (most recent call first):"]
        lines += [f'[rank{rank}]:   File "{file}", line {line} in {name}' for name, file, line in frames]
    assert "Rank 0 waits in full_tensor, rank 1 in barrier" in _said(tmp_path, *lines)


def test_the_stack_of_a_crash_is_no_stack_of_a_hang(tmp_path: pathlib.Path) -> None:
    lines = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):"]
    lines += [f'  File "{file}", line {line} in {name}' for name, file, line in _READING]
    explanation = explained(tmp_path, *lines)
    assert (explanation.showing, explanation.hang) == ("failure", None)


def _traceback(rank: int, raised: str, frames: Sequence[tuple[str, str, int]]) -> list[str]:
    shown = [f'  File "{file}", line {line}, in {name.rpartition(".")[2]}' for name, file, line in reversed(frames)]
    return [f"[rank{rank}]: {line}" for line in (BEGIN, *shown, raised)]


_CLOSED = "RuntimeError: [/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
_LATE = "RuntimeError: [/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 60000ms for send operation"


def test_tracebacks_of_a_time_out_say_where_the_ranks_were(tmp_path: pathlib.Path) -> None:
    lines = [*_traceback(1, _CLOSED, _IN_BARRIER), *_traceback(0, _LATE, _GATHERING)]
    explanation = explained(tmp_path, *lines)
    assert (explanation.showing, entry_of(explanation)) == ("hang", "rank0-only-gather-deadlock")


def test_a_job_ended_from_outside_gets_ways_to_find_its_hang(tmp_path: pathlib.Path) -> None:
    signal = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15"
    said = text.render_text(explained(tmp_path, BEGIN, '  File "run.py", line 8, in <module>', signal), 10_000)
    assert "If the job hung before that" in said
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL: look for `Detected mismatch between collectives`" in said
    closed = text.render_text(explained(tmp_path, *_traceback(1, _CLOSED, _IN_BARRIER)), 10_000)
    assert "If the job hung" not in closed


_SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 8x8)"


def test_one_message_from_two_places_is_two_failures(tmp_path: pathlib.Path) -> None:
    lines = [*_traceback(0, _SHAPES, [("load", "a.py", 6)]), *_traceback(1, _SHAPES, [("save", "b.py", 8)])]
    explanation = explained(tmp_path, *lines)
    assert explanation.cause is not None
    assert explanation.cause.sources == {"rank 0"}
    said = text.render_text(explanation, 10_000)
    assert "Raised elsewhere, too, with the same message, by rank 1 " in said
    assert 'at File "b.py", line 8, in save' in said


def test_two_files_with_one_message_at_two_places_are_two_failures(tmp_path: pathlib.Path) -> None:
    first = written(tmp_path, *_traceback(0, _SHAPES, [("load", "a.py", 6)])).rename(tmp_path / "first.txt")
    second = written(tmp_path, *_traceback(0, _SHAPES, [("load", "a.py", 60)]))
    assert len(explain([first, second]).others) == 1
    assert explain([first, first]).others == ()


def test_ranks_with_one_message_and_the_same_frames_stay_one(tmp_path: pathlib.Path) -> None:
    below = [("wrapper", "/env/site-packages/torch/x.py", 3), ("load", "/one/a.py", 6), ("main", "/one/a.py", 9)]
    other = [(name, file.replace("/one/", "/two/"), line) for name, file, line in below]
    cut = below[:2]
    lines = [line for rank, frames in enumerate((below, other, cut)) for line in _traceback(rank, _SHAPES, frames)]
    explanation = explained(tmp_path, *lines, f"[rank3]: {_SHAPES}")
    assert explanation.cause is not None
    assert (explanation.cause.sources, explanation.others) == ({f"rank {rank}" for rank in range(4)}, ())
