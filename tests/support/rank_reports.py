"""Made-up reports of ranks about a case."""

from typing import get_args

from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Record, Stage

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:39202"
STAGES = get_args(Stage)

# Stacks in faulthandler's format: the innermost frame first, the current thread last.
_OTHER_THREAD = """\
Thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/venv/torch/distributed/elastic/heartbeat.py", line 20 in beat

"""
WAITING = (
    _OTHER_THREAD
    + """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 4394 in all_gather_single
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 364 in foreach_all_gather
  File "/venv/torch/utils/_contextlib.py", line 124 in decorate_context
  File "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 407 in unshard
  File "/venv/fsdp_doctor/fsdp/paths_fsdp2.py", line 90 in unshard
"""
)
BUSY = (
    _OTHER_THREAD
    + """\
Current thread 0x00007f01 (most recent call first):
  File "/home/me/mine.py", line 7 in spin
  File "/venv/torch/distributed/distributed_c10d.py", line 83 in wrapper
  File "/venv/fsdp_doctor/examination.py", line 150 in _drain
"""
)
# The same stacks with the current thread first.
BUSY_FIRST = "Current thread" + BUSY.split("Current thread")[1] + "\n" + _OTHER_THREAD
WAITING_FIRST = "Current thread" + WAITING.split("Current thread")[1] + "\n" + _OTHER_THREAD
BARRIER = """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/mine.py", line 7 in wait
"""
NO_FRAME = """\
Current thread 0x00007f01 (most recent call first):
  <no Python frame>

Thread 0x00007f00 (most recent call first):
  File "/venv/torch/distributed/elastic/heartbeat.py", line 20 in beat
"""
WAITING_IN_DTENSOR = """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/_ops.py", line 882 in redispatch
  File "/venv/torch/_library/autograd.py", line 41 in forward_no_grad
  File "/venv/torch/_library/autograd.py", line 123 in autograd_impl
  File "/venv/torch/_ops.py", line 1279 in __call__
  File "/venv/torch/distributed/_functional_collectives.py", line 142 in wait_tensor
  File "/venv/torch/distributed/_functional_collectives.py", line 1122 in wait
  File "/venv/torch/distributed/tensor/_redistribute.py", line 1766 in redistribute_local_tensor
  File "/venv/torch/distributed/tensor/_redistribute.py", line 1918 in forward
  File "/venv/torch/autograd/function.py", line 625 in apply
  File "/venv/torch/distributed/tensor/_api.py", line 731 in redistribute
  File "/venv/torch/distributed/tensor/_api.py", line 774 in full_tensor
  File "/venv/fsdp_doctor/fsdp/paths_fsdp2.py", line 50 in to_full_tensor
"""


def record(stage="extract", *, done=True, failure=None, problems=(), unsupported=""):
    return Record(
        case_id="fsdp2/none/staged/dcp",
        stage=stage,
        failure=failure,
        problems=tuple(Problem(kind=kind, detail=detail) for kind, detail in problems),
        unsupported=unsupported,
        done=done,
    )


def failure(message="it broke", *, time=10.0, type="RuntimeError"):
    return Failure(type=type, message=message, traceback=f"Traceback\n{type}: {message}", time=time)


def fine(rank):
    return RankReport(rank=rank, record=record("next step"))


def failed(rank, message="it broke", *, stage="extract", time=10.0, type="RuntimeError", problems=()):
    return RankReport(
        rank=rank, record=record(stage, failure=failure(message, time=time, type=type), problems=problems)
    )


def found(rank, *problems, stage="next step"):
    return RankReport(rank=rank, record=record(stage, problems=problems))


def ended(rank, exit="SIGKILL", *, stage="extract", time=10.0, **fields):
    return RankReport(rank=rank, record=record(stage, done=False), exit=exit, exit_time=time, **fields)


def stopped(rank, stack=BUSY, *, stage="extract", why="deadline", **fields):
    detail = {"deadline": "not done after 60 s", "others": "still running when another rank was in trouble"}[why]
    return RankReport(
        rank=rank,
        record=record(stage, done=False, **fields.pop("record", {})),
        stopped=why,
        stopped_detail=detail,
        exit_time=70.0,
        stack=stack,
        **fields,
    )
