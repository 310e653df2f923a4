"""A hang: the watchdog and the flight recorder become a table, and a sentence on where the ranks differ."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.inside import doctor
from support.places import TESTS
from support.written_logs import explained

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import explain, text
from fsdp_doctor.explain.hangs import Waiting, make_hang, name_ranks

_DUMPS = TESTS / "explain" / "dumps"


def _watchdog(rank: int, number: int, operation: str, sizes: tuple[int, int] = (4, 8)) -> Iterator[str]:
    glog = f"[rank{rank}]:[E1122 06:40:00.504052851 ProcessGroupNCCL.cpp:616]"
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={sizes[0]}, NumelOut={sizes[1]}, Timeout(ms)=600000)"
    yield f"{glog} [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600080 milliseconds."
    status = f"PG status: last enqueued work: {number + 2}, last completed work: {number - 1}"
    yield f"{glog} [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure at work sequence id: {number} {status}"


def _parting(tmp_path: pathlib.Path, *ranks: Iterator[str]) -> str:
    explanation = explained(tmp_path, *(line for rank in ranks for line in rank))
    assert (explanation.showing, explanation.entry) == ("hang", None)
    assert explanation.hang is not None
    return " ".join(explanation.hang.sentences)


def test_ranks_in_different_collectives_are_said_to_part_there(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, _watchdog(0, 122, "_REDUCE_SCATTER_BASE", (8, 4)), _watchdog(1, 126, "_ALLGATHER_BASE"))
    assert said == "Rank 0 is in REDUCE_SCATTER 122, rank 1 is in ALLGATHER 126: rank 0 is 4 behind."


def test_a_rank_has_its_number_in_the_job_not_in_the_group(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, (line.replace("Rank 9]", "Rank 0]") for line in _watchdog(9, 7, "ALLREDUCE", (1, 1))))
    assert said.startswith("Rank 9 ")


def test_the_same_collective_with_other_sizes_is_said(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, _watchdog(0, 9, "_ALLGATHER_BASE", (40, 80)), _watchdog(1, 9, "_ALLGATHER_BASE", (2, 4)))
    assert "rank 0 with 40 in and 80 out, rank 1 with 2 in and 4 out" in said


def test_ranks_of_which_the_log_says_nothing_are_named(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, *(_watchdog(rank, 7, "ALLREDUCE", (1, 1)) for rank in (1, 2, 5)))
    assert said.startswith("Ranks 1-2 and 5 wait in ALLREDUCE 7, and the log says nothing about ranks 0 and 3-4")
    assert _parting(tmp_path, _watchdog(0, 7, "_ALLGATHER_BASE", (4, 16))).startswith("Rank 0 of a group of 4 waits in")


def test_the_table_has_a_row_for_ranks_in_the_same_place(tmp_path: pathlib.Path) -> None:
    ranks = [_watchdog(rank, 7, "_ALLGATHER_BASE") for rank in (0, 1)]
    shown = text.render_text(explained(tmp_path, *(line for rank in ranks for line in rank)), 120)
    header, row = (line.split() for line in shown.splitlines() if "default_pg" in line or "waits in" in line)
    assert " ".join(header) == "ranks group waits in in out last launched last done seconds"
    assert row == ["0-1", "default_pg", "ALLGATHER", "7", "4", "8", "9", "6", "600"]


def _stack(rank: int, *callers: str) -> list[str]:
    glog = f"[rank{rank}]:[E1122 06:40:00.504052851 ProcessGroupNCCL.cpp:733] [Rank {rank}]"
    return [
        f"{glog} Stack trace of the failed collective: ",
        f"[rank{rank}]: #0 all_gather_into_tensor from /env/torch/distributed/distributed_c10d.py:4186",
        *(f"[rank{rank}]: #{number} {caller}" for number, caller in enumerate(callers, 1)),
    ]


def test_a_failed_collectives_stack_reveals_a_gather_on_one_rank(tmp_path: pathlib.Path) -> None:
    lines = [*_watchdog(0, 9, "_ALLGATHER_BASE"), *_stack(0, "state_dict from /job/train.py:70")]
    lines += [*_watchdog(1, 9, "_REDUCE_SCATTER_BASE"), *_stack(1, "train_step from /job/train.py:71")]
    explanation = explained(tmp_path, *lines)
    assert explanation.entry is not None
    assert explanation.entry.id == "rank0-only-gather-deadlock"
    shown = text.render_text(explanation, 120)
    assert 'rank 0 called it at File "/job/train.py", line 70, in state_dict' in shown
    assert 'rank 1 called it at File "/job/train.py", line 71, in train_step' in shown


_OF_TRL = "/env/trl/experimental/async_grpo/async_grpo_trainer.py"
_FULL_TENSOR = "full_tensor from /env/torch/distributed/tensor/_api.py:670"
_DRAINS = _stack(1, _FULL_TENSOR, f"_streaming_iter from {_OF_TRL}:1120", f"_sync_weight from {_OF_TRL}:1143")


def test_weight_sync_gathers_on_rank_0_for_an_engine_are_known(tmp_path: pathlib.Path) -> None:
    packed = "packed_nccl_broadcast_producer from /env/vllm/distributed/weight_transfer/packed_tensor.py:196"
    lines = [*_watchdog(0, 12, "COALESCED"), *_stack(0, _FULL_TENSOR, packed, f"send_weights from {_OF_TRL}:200")]
    explanation = explained(tmp_path, "fsdp_version: 2", *lines, *_watchdog(1, 40, "_ALLGATHER_BASE"), *_DRAINS)
    assert explanation.entry is not None
    assert explanation.entry.id == "gather-interleaved-with-send"
    assert explanation.hang is not None
    assert explanation.hang.differs


def test_weight_sync_gathers_that_rank_0_never_joins_are_likely(tmp_path: pathlib.Path) -> None:
    lines = [*_watchdog(1, 40, "_ALLGATHER_BASE", (4, 16)), *_DRAINS]
    explanation = explained(tmp_path, "fsdp_version: 2", *lines)
    assert [match.entry.id for match in explanation.matches] == ["gather-interleaved-with-send"]
    assert explanation.entry is None


def test_a_failure_is_told_before_the_hang_that_it_caused(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, *_watchdog(1, 9, "_ALLGATHER_BASE"), "[rank0]: ValueError: no such file")
    assert explanation.showing == "failure"
    assert explanation.hang is not None


def test_dumps_of_a_flight_recorder_show_where_ranks_part_and_who_called() -> None:
    run = doctor("explain", *(str(_DUMPS / f"nccl_trace_rank_{rank}") for rank in (0, 1)))
    assert (run.code, run.stderr) == (0, "")
    assert "Rank 0 is in ALLGATHER 4, rank 1 is in ALLREDUCE 4." in run.stdout
    assert 'rank 1 called it at File "/job/train.py", line 8, in train_step' in run.stdout
    assert "Known: rank0-only-gather-deadlock" in run.stdout


def test_json_dumps_have_no_stacks_and_therefore_show_only_the_place() -> None:
    run = doctor("explain", *(str(_DUMPS / f"trace_rank_{rank}.json") for rank in (0, 1)))
    assert (run.code, run.stderr) == (1, "")
    assert "Rank 0 is in ALLGATHER 4, rank 1 is in ALLREDUCE 4." in run.stdout


def _dump(calls: list[tuple[str, bool]], rank: int, folder: pathlib.Path) -> pathlib.Path:
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ("0", "default_pg"),
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[4]],
            "output_sizes": [[8]],
            "state": "completed" if ended else "started",
            "is_p2p": False,
        }
        for number, (name, ended) in enumerate(calls, 1)
    ]
    path = folder / f"comm_lib_trace_rank_{rank}"
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": entries}, protocol=2))
    return path


def test_a_rank_that_never_came_is_named_by_its_last_call(tmp_path: pathlib.Path) -> None:
    waits = [("all_gather", True), ("all_reduce", False)]
    files = [_dump(waits, 0, tmp_path), _dump(waits[:1], 1, tmp_path)]
    explanation = explain(files)
    assert explanation.hang is not None
    assert [(rank.rank, rank.call, rank.entered) for rank in explanation.hang.waiting] == [
        (0, "ALLREDUCE 2", True),
        (1, "ALLGATHER 1", False),
    ]


def test_dumps_without_a_difference_show_no_hang(tmp_path: pathlib.Path) -> None:
    files = [_dump([("all_gather", True)], rank, tmp_path) for rank in (0, 1)]
    assert (explain(files).showing, explain(files).hang) == ("nothing", None)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not be printed",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [_Evil()]}, 2),
        pickle.dumps({"entries": [_Evil()]}, 4),
        b"\x80\x02(((",
        b"\x80\x02a.",
        b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x",
        pickle.dumps({"entries": 3}, 2),
    ],
    ids=["a function", "a function, protocol 4", "cut off", "an empty stack", "an announced size", "no list"],
)
def test_a_pickle_that_is_not_a_dump_is_refused_without_being_run(
    data: bytes, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(data)
    with pytest.raises(UsageError, match="nccl_trace_rank_0"):
        explain([file])
    assert capsys.readouterr().out == ""


def test_a_json_file_that_is_no_dump_is_read_as_a_log(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"error": "ValueError: no"}))
    assert explain([file]).showing == "failure"


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2 and 5"), ([1, 3, 5], "ranks 1, 3 and 5")]
)
def test_ranks_are_named_in_runs(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_nothing_that_waits_is_no_hang() -> None:
    assert make_hang([]) is None
    assert make_hang([Waiting(rank=0, op="ALLREDUCE", number=3)]) is not None
