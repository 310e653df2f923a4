"""A hang: what the watchdog and the flight recorder say becomes a table, and a sentence on where the ranks part."""

from __future__ import annotations

import json
import pathlib
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

import pytest
from support.inside import doctor
from support.places import TESTS

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import Explanation, explain, text
from fsdp_doctor.explain.collectives import Waiting, hang_of, named
from fsdp_doctor.explain.plain_pickle import NotPlain, read_plain_pickle

_DUMPS = TESTS / "explain" / "dumps"


def _watchdog(rank: int, number: int, operation: str, sizes: tuple[int, int] = (4, 8)) -> Iterator[str]:
    glog = f"[rank{rank}]:[E1122 06:40:00.504052851 ProcessGroupNCCL.cpp:616]"
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={sizes[0]}, NumelOut={sizes[1]}, Timeout(ms)=600000)"
    yield f"{glog} [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600080 milliseconds."
    status = f"PG status: last enqueued work: {number + 2}, last completed work: {number - 1}"
    yield f"{glog} [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure at work sequence id: {number} {status}"


def _explained(tmp_path: pathlib.Path, *lines: str) -> Explanation:
    file = tmp_path / "log.txt"
    file.write_text("\n".join(lines) + "\n")
    return explain([file])


def _parting(tmp_path: pathlib.Path, *ranks: Iterator[str]) -> str:
    found = _explained(tmp_path, *(line for rank in ranks for line in rank))
    assert (found.showing, found.entry) == ("hang", None)
    assert found.hang is not None
    return " ".join(found.hang.parting)


def test_ranks_in_different_collectives_are_said_to_part_there(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, _watchdog(0, 122, "_REDUCE_SCATTER_BASE", (8, 4)), _watchdog(1, 126, "_ALLGATHER_BASE"))
    assert said == "Rank 0 is in REDUCE_SCATTER 122, rank 1 is in ALLGATHER 126: rank 0 is 4 behind."


def test_the_same_collective_with_other_sizes_is_said(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, _watchdog(0, 9, "_ALLGATHER_BASE", (40, 80)), _watchdog(1, 9, "_ALLGATHER_BASE", (2, 4)))
    assert "in the same collective, ALLGATHER 9, with different sizes" in said
    assert "rank 0 with 40 in and 80 out, rank 1 with 2 in and 4 out" in said


def test_ranks_of_which_the_log_says_nothing_are_named(tmp_path: pathlib.Path) -> None:
    said = _parting(tmp_path, *(_watchdog(rank, 7, "ALLREDUCE", (1, 1)) for rank in (1, 2, 5)))
    assert said.startswith("Ranks 1-2 and 5 wait in ALLREDUCE 7, and of ranks 0 and 3-4 the log says nothing")
    assert _parting(tmp_path, _watchdog(0, 7, "_ALLGATHER_BASE", (4, 16))).startswith("Rank 0 of a group of 4 waits in")


def test_the_table_has_a_row_for_ranks_in_the_same_place(tmp_path: pathlib.Path) -> None:
    ranks = [_watchdog(rank, 7, "_ALLGATHER_BASE") for rank in (0, 1)]
    shown = text.as_text(_explained(tmp_path, *(line for rank in ranks for line in rank)), 120)
    header, row = (line.split() for line in shown.splitlines() if "default_pg" in line or "waits in" in line)
    assert " ".join(header) == "ranks group waits in in out last launched last done seconds"
    assert row == ["0-1", "default_pg", "ALLGATHER", "7", "4", "8", "9", "6", "600"]


def test_the_stack_of_a_failed_collective_is_read_and_makes_a_gather_on_one_rank_known(tmp_path: pathlib.Path) -> None:
    def stack(rank: int, function: str) -> list[str]:
        glog = f"[rank{rank}]:[E1122 06:40:00.504052851 ProcessGroupNCCL.cpp:733] [Rank {rank}]"
        return [
            f"{glog} Stack trace of the failed collective: ",
            f"[rank{rank}]: #0 all_gather_into_tensor from /env/torch/distributed/distributed_c10d.py:4186",
            f"[rank{rank}]: #1 {function} from /job/train.py:{70 + rank}",
        ]

    lines = [*_watchdog(0, 9, "_ALLGATHER_BASE"), *stack(0, "state_dict")]
    lines += [*_watchdog(1, 9, "_REDUCE_SCATTER_BASE"), *stack(1, "train_step")]
    found = _explained(tmp_path, *lines)
    assert found.entry is not None
    assert found.entry.id == "rank0-only-gather-deadlock"
    shown = text.as_text(found, 120)
    assert 'rank 0 called it at File "/job/train.py", line 70, in state_dict' in shown
    assert 'rank 1 called it at File "/job/train.py", line 71, in train_step' in shown


def test_a_failure_is_told_before_the_hang_that_it_caused(tmp_path: pathlib.Path) -> None:
    found = _explained(tmp_path, *_watchdog(1, 9, "_ALLGATHER_BASE"), "[rank0]: ValueError: no such file")
    assert found.showing == "failure"
    assert found.hang is not None


def test_the_dumps_of_a_flight_recorder_say_where_the_ranks_part_and_who_called() -> None:
    run = doctor("explain", *(str(_DUMPS / f"nccl_trace_rank_{rank}") for rank in (0, 1)))
    assert (run.code, run.stderr) == (0, "")
    assert "Rank 0 is in ALLGATHER 4, rank 1 is in ALLREDUCE 4." in run.stdout
    assert 'rank 1 called it at File "/job/train.py", line 8, in train_step' in run.stdout
    assert "Known: rank0-only-gather-deadlock" in run.stdout


def test_the_dumps_as_json_have_no_stacks_and_so_no_more_than_the_place() -> None:
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
    found = explain(files)
    assert found.hang is not None
    assert found.hang.parting == (
        "Rank 0 is in ALLREDUCE 2; rank 1 never came there, the last of its calls being ALLGATHER 1.",
    )


def test_dumps_without_a_difference_show_no_hang(tmp_path: pathlib.Path) -> None:
    files = [_dump([("all_gather", True)], rank, tmp_path) for rank in (0, 1)]
    assert text.as_text(explain(files), 120).startswith("Every collective in the flight recorder's dumps has ended")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not be printed",)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps({"entries": [_Evil()]}, 2), "the opcode GLOBAL"),
        (pickle.dumps({"entries": [_Evil()]}, 4), "the opcode STACK_GLOBAL"),
        (pickle.dumps({(1, 2): 3}, 2), "a key that is neither text nor a number"),
        (b"\x80\x02(((", "exhausted"),
        (b"\x80\x02a.", "its stack is empty"),
        (b"\x80\x02" + b"}" * 3_100_000, "more than 3000000 opcodes"),
    ],
    ids=["a function", "a function, protocol 4", "a nested key", "cut off", "an empty stack", "too many"],
)
def test_a_pickle_is_read_without_running_anything_of_it(
    data: bytes, why: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotPlain, match=why):
        read_plain_pickle(data)
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(data)
    with pytest.raises(UsageError, match="no dump of torch's flight recorder"):
        explain([file])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_containers_text_and_numbers_come_out_of_a_pickle_as_they_were(protocol: int) -> None:
    shared = ["x", 1.5, -(2**40)]
    value = {"a": [shared, shared, (1,), (1, 2), (), (1, 2, 3, 4)], "b": None, "c": [True, False], "d": {"e": {}}}
    data = pickle.dumps(value, protocol)
    assert read_plain_pickle(data) == value
    assert read_plain_pickle(pickletools.optimize(data)) == value


def test_a_json_file_that_is_no_dump_is_read_as_a_log(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"error": "ValueError: no"}))
    assert explain([file]).showing == "failure"


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2 and 5"), ([1, 3, 5], "ranks 1, 3 and 5")]
)
def test_ranks_are_named_in_runs(ranks: list[int], words: str) -> None:
    assert named(ranks) == words


def test_nothing_that_waits_is_no_hang() -> None:
    assert hang_of([]) is None
    assert hang_of([Waiting(rank=0, op="ALLREDUCE", number=3)]) is not None
