"""``fsdp-doctor explain`` as a process: its time and memory for any input, devices, pipes, a log of torchrun."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from program import Started, run, torchrun
from support.written_logs import UNSHARD, entry_of, traceback, written

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import explain, log_input
from fsdp_doctor.explain.text import render_text
from fsdp_doctor.machine import waited_input

_RANKS = 20_000
_SUMMARY = (
    "[{0}]:\n  time      : 2026-11-21_12:34:56\n  host      : h\n  rank      : {0} (local_rank: 0)\n"
    "  exitcode  : 1 (pid: 1)\n  error_file: <N/A>\n"
)
_INPUTS = {
    "a summary of many ranks": lambda: "ChildFailedError: \n" + "".join(map(_SUMMARY.format, range(_RANKS))),
    "ranks that all raise": lambda: "".join(f"[rank{rank}]: RuntimeError: boom {rank}\n" for rank in range(_RANKS)),
    "tracebacks that are all open": lambda: "".join(
        f"[rank{rank}]: {line}\n"
        for line in ("Traceback (most recent call last):", '  File "/a.py", line 3, in f')
        for rank in range(_RANKS)
    ),
    "exceptions that all differ": lambda: "".join(f"ValueError: {number:b}x\n" for number in range(_RANKS)),
    "one line": lambda: "x" * 3_000_000,
    "openings": lambda: ("(pid=[rank> " * 1_000 + "rror\n") * 100,
    "boxes": lambda: "│ ❱ 834 │ foo\n│ /a/b.py:3 in f │\n" * _RANKS,
    "an exception in an exception": lambda: ("AError: BError: " * 1_000 + "\n") * 100,
    "names without end": lambda: "Missing key(s) in state_dict: " + '"_fsdp_wrapped_module.x", ' * 50_000,
}


_EXPLAIN_EACH = """
import pathlib, sys
from fsdp_doctor.explain import explain
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    print(path.name, explain([path]).showing)
"""


def test_two_seconds_for_each_megabyte_are_enough(tmp_path: pathlib.Path) -> None:
    for name, write in _INPUTS.items():
        (tmp_path / name).write_text(write(), encoding="utf-8")
    seconds = sum(1 + 2 * file.stat().st_size // 1_000_000 for file in tmp_path.iterdir())
    limit = f'ulimit -t {seconds}; exec "$@"'
    finished = run("bash", "-c", limit, "bash", sys.executable, "-c", _EXPLAIN_EACH, str(tmp_path))
    assert finished.code == 0, finished.stderr
    assert len(finished.stdout.splitlines()) == len(_INPUTS)


def test_random_bytes_are_refused_after_a_few(tmp_path: pathlib.Path) -> None:
    for device in ("/dev/urandom", "/dev/zero"):
        with pytest.raises(UsageError, match=str(device)):
            explain([pathlib.Path(device)])


def test_endless_input_is_read_up_to_a_limit_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_input, "MAX_STREAM", 1 << 20)
    end, begin = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(begin, b"ValueError: x\n" * 1_000)

    writer = threading.Thread(target=write)
    writer.start()
    with open(end) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        explanation = explain([None])
    writer.join()
    os.close(begin)
    assert explanation.truncated == ("standard input",)
    assert "standard input" in render_text(explanation, 100)


def test_memory_does_not_grow_with_the_log(tmp_path: pathlib.Path) -> None:
    line = "[rank{}]: 2026-11-20 10:00:00,000 INFO trainer step={} loss=0.1 lr=1e-5 " + "x" * 100 + "\n"
    file = tmp_path / "log.txt"

    def peak(megabytes: int) -> int:
        block = "".join(line.format(rank, rank) for rank in range(1000)) + "[rank1]: ValueError: not this one\n"
        with open(file, "w") as out:
            for _ in range(megabytes * 1_000_000 // len(block)):
                out.write(block)
            out.write("\n".join(traceback(UNSHARD.format(0))) + "\n")
        program = (
            "import resource, pathlib, sys; from fsdp_doctor.explain import explain; "
            "explanation = explain([pathlib.Path(sys.argv[1])]); assert explanation.entry is not None; "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert peak(60) < 1.2 * peak(6)


def test_the_log_of_a_real_torchrun_is_explained(tmp_path: pathlib.Path) -> None:
    """The ranks really fail, and torchrun really writes the log."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, time\n"
        "from torch.distributed.utils import _p_assert\n"
        "def take_state_dict():\n"
        "    _p_assert(False, 'Expects tensor to be on the compute device cuda:1, was on cpu')\n"
        "if os.environ['RANK'] == '1':\n"
        "    take_state_dict()\n"
        "time.sleep(60)\n"
    )
    finished = torchrun("--nproc-per-node=2", str(script))
    explanation = explain([written(tmp_path, finished.stdout + finished.stderr)])
    assert entry_of(explanation) == "fsdp1-manual-offload-then-state-dict"
    assert explanation.summary is not None
    assert explanation.summary.rank == 1
    assert "torchrun's summary" in explanation.consequences


def test_a_named_pipe_is_waited_for_and_the_wait_can_be_stopped(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waiting = Started(sys.executable, "-m", "fsdp_doctor", "explain", str(pipe))
    assert str(pipe) in waiting.first_message()
    waiting.interrupt()
    finished = waiting.wait()
    assert (finished.code, finished.stdout) == (130, "")
    assert "Traceback" not in finished.stderr


def test_a_named_pipe_that_nobody_writes_to_is_given_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(waited_input, "_MESSAGE_AFTER_S", 0.01)
    monkeypatch.setattr(waited_input, "_GIVE_UP_AFTER_S", 0.02)
    with pytest.raises(UsageError, match=str(pipe)):
        explain([pipe])
