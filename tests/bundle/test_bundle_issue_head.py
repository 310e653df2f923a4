"""The first lines of issue.md name the rank that failed and the line it was at, and nobody else."""

from __future__ import annotations

import pathlib

import pytest

from fsdp_doctor.bundle import gather
from fsdp_doctor.bundle.command_run import CommandRun, RankStack
from fsdp_doctor.bundle.issue import make_head

_MAIN = """Thread 0x00007f01 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4287 in all_gather
  File "/project/train.py", line 4 in gathers_alone
  File "/project/train.py", line 9 in <module>"""
_OTHER = """Thread 0x00007f02 (most recent call first):
  File "/project/loader.py", line 7 in reads_ahead"""
_SUMMARY = """
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_12:00:05
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
"""
_RAISED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/project/train.py", line 4, in step
[rank1]:     raise ValueError("no")
[rank1]: ValueError: no
"""


@pytest.mark.parametrize(
    "stack",
    [
        f"Fatal Python error: Aborted\n\n{_OTHER}\n\n{_MAIN}",
        f"Fatal Python error: Aborted\n\n{_MAIN.replace('Thread', 'Current thread')}\n\n{_OTHER}",
        f"Fatal Python error: Aborted\n\n{_OTHER}\n\n{_MAIN.replace('Thread', 'Current thread')}",
    ],
)
def test_a_rank_is_located_at_the_users_line_of_its_main_thread(stack: str) -> None:
    assert RankStack(name="rank 0", stack=stack).place == 'File "/project/train.py", line 4 in gathers_alone'


@pytest.mark.parametrize(("log", "place"), [(_SUMMARY, ""), (_RAISED + _SUMMARY, '; File "/project/train.py", line 4')])
def test_a_rank_that_torchrun_ended_is_not_among_those_that_failed(
    tmp_path: pathlib.Path, log: str, place: str
) -> None:
    output = tmp_path / "bug.zip.log"
    output.write_text(log)
    run = CommandRun(
        command=("torchrun", "train.py"),
        end="exited",
        exit_code=1,
        seconds=5.0,
        silent=0.0,
        output=output,
        rank_exit_codes={0: -15, 1: -9},
    )
    where = make_head(gather({}, run=run), None).where
    assert where.startswith(f"rank 1{place}")
    assert "rank 0" not in where
