"""``fsdp-doctor explain``: the root cause out of logs as they come, and what is printed of it."""

from __future__ import annotations

import io
import json
import pathlib
import random
import sys

import pytest
from support.inside import doctor
from support.written_logs import BEGIN, DURING, STORAGE, UNSHARD, cause_of, entry_of, explained, traceback, written

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import Explanation, explain, text
from fsdp_doctor.known.catalogue import find_entry

_POLICY = "fsdp2-pinned-policy-half-moved"
_MANUAL = "fsdp1-manual-offload-then-state-dict"
_KILLED = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4229)\n"


def _interleaved(streams: list[list[str]], seed: int = 0) -> list[str]:
    """Each stream's lines in their order, the streams mixed."""
    order = random.Random(seed)
    waiting = [list(stream) for stream in streams]
    lines = []
    while any(waiting):
        lines.append(order.choice([stream for stream in waiting if stream]).pop(0))
    return lines


def _sources(explanation: Explanation) -> set[str]:
    assert explanation.cause is not None
    return explanation.cause.sources


@pytest.mark.parametrize("seed", range(5))
def test_of_64_interleaved_ranks_every_one_that_raised_is_named(tmp_path: pathlib.Path, seed: int) -> None:
    streams = [[f"[rank{rank}]: {line}" for line in traceback(STORAGE.format(rank % 8))] for rank in range(64)]
    explanation = explained(tmp_path, *_interleaved(streams, seed))
    assert entry_of(explanation) == _POLICY
    assert _sources(explanation) == {f"rank {rank}" for rank in range(64)}


def test_a_consequence_is_no_cause_though_it_comes_first(tmp_path: pathlib.Path) -> None:
    cascade = "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40214"
    watchdog = (
        "[rank2]:[E1121 12:34:56.789 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=512, OpType=_ALLGATHER_BASE)"
    )
    lines = [cascade, watchdog, *(f"[rank0]: {line}" for line in traceback(UNSHARD.format(0)))]
    explanation = explained(tmp_path, *lines)
    assert (entry_of(explanation), _sources(explanation)) == (_MANUAL, {"rank 0"})
    assert sum(explanation.consequences.values()) == 2


def test_time_stamps_order_the_logs_of_ranks_in_separate_files(tmp_path: pathlib.Path) -> None:
    late = ["2026-04-13 10:00:09,000 INFO sync", *traceback(UNSHARD.format(0))]
    early = ["2026-04-13 10:00:01,500 INFO sync", *traceback(STORAGE.format(1))]
    files = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    for file, lines in zip(files, (late, early), strict=True):
        file.write_text("\n".join(lines) + "\n")
    explanation = explain(files)
    assert entry_of(explanation) == _POLICY
    assert cause_of(explanation).file == str(files[1])


def test_rays_prefixes_and_colours_are_removed_with_or_without_the_escape_character(tmp_path: pathlib.Path) -> None:
    for colour in ("\x1b[36m{}\x1b[0m ", "[36m{}[0m "):
        prefix = colour.format("(WorkerDict pid=812, ip=10.0.0.1)")
        other = colour.format("(WorkerDict pid=813, ip=10.0.0.1)")
        streams = [[prefix + line for line in traceback(STORAGE.format(0))]]
        streams += [[other + line for line in traceback(STORAGE.format(1))]]
        explanation = explained(tmp_path, *_interleaved(streams))
        assert entry_of(explanation) == _POLICY
        assert _sources(explanation) == {"pid 812 on 10.0.0.1", "pid 813 on 10.0.0.1"}


def test_rays_wrapper_is_not_taken_for_the_exception_that_it_carries(tmp_path: pathlib.Path) -> None:
    lines = [
        "ray.exceptions.RayTaskError(AssertionError): ray::WorkerDict.compute_log_prob() (pid=618, ip=10.0.0.1)",
        '  File "/opt/verl/verl/single_controller/ray/base.py", line 399, in func',
        "    return getattr(self.worker_dict[key], name)(*args, **kwargs)",
        '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in compute_log_prob',
        UNSHARD.format(0) + " [repeated 7x across cluster]",
    ]
    explanation = explained(tmp_path, *lines)
    assert entry_of(explanation) == _MANUAL
    assert cause_of(explanation).text == UNSHARD.format(0)
    assert explanation.others == ()


@pytest.mark.parametrize(
    "text",
    [
        '> Traceback (most recent call last): File "/a/fsdp_workers.py", line 652, in rollout_mode params = '
        'self.actor.state_dict() RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a\n'
        '> storage on different device "npu:0". This is no longer allowed; the devices must match.\n',
        "Hi, training works but the sync dies with\n```\nRuntimeError: Attempted to set the storage of a tensor on "
        "device \u201ccpu\u201d\nto a storage on different device \u201ccuda:0\u201d.\n```\nAny idea?\n",
        '  RuntimeError: Attempted to set the storage of a tensor on device "cpu"\r\n  to a storage on different device'
        ' "cuda:0"\r\n',
        'it says Attempted to set the storage of a tensor on device "cpu" to a storage on different device "cuda:0"',
    ],
    ids=["one line", "smart quotes in prose", "windows line ends", "no exception's name"],
)
def test_a_message_that_lost_its_form_in_an_issue_is_found(tmp_path: pathlib.Path, text: str) -> None:
    explanation = explained(tmp_path, text)
    assert explanation.matches[0].entry.id == _POLICY
    assert explanation.grade == ("known" if "fsdp_workers.py" in text else "possible")


def test_the_rank_that_torchrun_saw_fail_first_is_believed(tmp_path: pathlib.Path) -> None:
    lines = [
        *(f"[rank0]: {line}" for line in traceback(UNSHARD.format(0))),
        *(f"[rank3]: {line}" for line in traceback(STORAGE.format(3))),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_12:34:56",
        "  host      : localhost",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 4229)",
    ]
    explanation = explained(tmp_path, *lines)
    assert (entry_of(explanation), _sources(explanation)) == (_POLICY, {"rank 3"})
    assert explanation.summary is not None
    assert explanation.summary.sentence == "torchrun saw rank 3 fail first, with exit code 1"


@pytest.mark.parametrize(
    ("log", "code", "said"),
    [
        (_KILLED, 1, ["torchrun saw rank 1 fail first, with SIGKILL"]),
        (
            "[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:40214\n",
            1,
            ["only consequences of a failure elsewhere", "look in the logs of the other ranks"],
        ),
        (
            "\n".join(traceback("RuntimeError: cannot set the storage of a tensor, a different storage is held")),
            1,
            [
                "It is not in the catalogue",
                "To find the cause: ",
                "Root cause",
                "To report it",
                "fsdp-doctor env",
            ],
        ),
        (
            "\n".join(traceback(STORAGE.format(0))),
            0,
            [
                *("Root cause: ", "in rollout_mode", "Cause: ", "Remedy: ", "full_tensor()", "verl-project/verl#5995"),
                "Reproduce: fsdp-doctor probe --case 'fsdp2/policy/staged/state_dict'",
            ],
        ),
        ("step 1\nstep 2\n", 1, ["found no failure in the log"]),
    ],
    ids=["killed", "consequences", "unknown", "known", "nothing"],
)
def test_the_command_says_in_this_order_what_there_is(
    tmp_path: pathlib.Path, log: str, code: int, said: list[str]
) -> None:
    run = doctor("explain", str(written(tmp_path, log)), env={"COLUMNS": "1000"})
    assert run.code == code
    places = [run.stdout.find(words) for words in said]
    assert min(places) >= 0, run.stdout
    assert places == sorted(places)


def test_the_json_has_the_entry_and_the_place(tmp_path: pathlib.Path) -> None:
    data = json.loads(doctor("explain", str(written(tmp_path, *traceback(STORAGE.format(0)))), "--json").stdout)
    assert (data["matched"], data["entry"]["id"], data["cause"]["line"]) == (True, _POLICY, 6)
    assert data["entry"]["command"] == "fsdp-doctor probe --case 'fsdp2/policy/staged/state_dict'"


def test_an_unknown_exception_before_a_known_one_is_said(tmp_path: pathlib.Path) -> None:
    lines = [*traceback("ImportError: cannot import name 'flash_attn_func'"), *traceback(UNSHARD.format(0))]
    explanation = explained(tmp_path, *lines)
    assert entry_of(explanation) == _MANUAL
    assert [other.type for other in explanation.others] == ["ImportError"]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["worker-0  | " + line for line in traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        (["[pod/job-0/pytorch] " + line for line in traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        ([">" + line for line in traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        (traceback("mypkg.SyncAborted: no"), "SyncAborted: no"),
        (traceback("_queue.Empty"), "Empty"),
        (["FutureWarning: old", "loss/MeanSquaredError: 0.123", *traceback("TypeError: bad")], "TypeError: bad"),
        (["WARNING ImportError: No module named flash_attn", *traceback("TypeError: bad")], "TypeError: bad"),
        (
            [*traceback("KeyError: 'x'"), "", DURING, "", *traceback("ValueError: no x")],
            "ValueError: no x",
        ),
        (
            ["RuntimeError: [buffer.cc:81] Timed out waiting 1800000ms for recv", *traceback("IndexError: 1")],
            "IndexError: 1",
        ),
        (traceback("KeyboardInterrupt") + traceback("ValueError: SIGTERM handler"), "ValueError: SIGTERM handler"),
        (
            [
                f"ValueError: cannot decode {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}"
                for i in range(2500)
            ]
            + traceback(UNSHARD.format(0)),
            UNSHARD.format(0),
        ),
    ],
    ids=[
        *("compose's label", "a pod's label", "quoted without a space", "any name after frames", "a bare name"),
        *("warnings and metrics", "a logged exception", "a handled exception", "a wait in vain", "the word SIGTERM"),
        "thousands of others",
    ],
)
def test_the_cause_is_found_among(tmp_path: pathlib.Path, lines: list[str], cause: str) -> None:
    explanation = explained(tmp_path, *lines)
    assert cause_of(explanation).text == cause


def test_long_tracebacks_of_64_interleaved_ranks_keep_their_frames(tmp_path: pathlib.Path) -> None:
    deep = [f'  File "/opt/a{i}.py", line {i}, in f{i}' for i in range(38)]
    last = '  File "/opt/torch/distributed/tensor/_api.py", line 500, in full_tensor'
    raised = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    streams = [[f"[rank{rank}]: {line}" for line in (BEGIN, *deep, last, raised)] for rank in range(64)]
    assert entry_of(explained(tmp_path, *_interleaved(streams))) == "full-gather-runs-out-of-memory"


def test_holes_that_a_truncated_log_has_are_no_binary_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_bytes(b"INFO a line\n" * 50 + b"\0" * 20 + "\n".join(traceback(UNSHARD.format(0))).encode())
    assert entry_of(explain([file])) == _MANUAL


@pytest.mark.parametrize(
    "told",
    [
        "Nov 22 11:02:09 gpu-7 kernel: Out of memory: Killed process 77123 (pt_main_thread) total-vm:90210kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=31337,uid=0",
        "    Reason:       OOMKilled",
        "slurmstepd: error: Detected 3 oom_kill events in StepId=4.batch.",
    ],
)
def test_a_process_that_was_killed_for_host_memory_is_where_to_look(tmp_path: pathlib.Path, told: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(f"INFO saving\n{told}\n[rank1]: RuntimeError: Connection closed by peer [10.0.0.1]:40214\n")
    run = doctor("explain", str(file))
    said = " ".join(run.stdout.split())
    assert "killed for lack of host memory" in said
    assert "log.txt, line 2" in said
    assert "is not in this log" not in said


@pytest.mark.parametrize(
    "words", ["the zoom-kill event of the dataset", "set vm.overcommit so that no OOM comes", "torch: out of memory?"]
)
def test_words_of_memory_alone_are_no_process_that_was_killed(tmp_path: pathlib.Path, words: str) -> None:
    assert not explained(tmp_path, *[words, *traceback(UNSHARD.format(0))]).killed_for_memory


def test_an_earlier_failure_of_another_rank_is_not_dismissed_as_a_cause(tmp_path: pathlib.Path) -> None:
    other = [BEGIN, '  File "/opt/me/reward.py", line 8, in score', "    return table[answer]", "IndexError: 7"]
    known = traceback(UNSHARD.format(0))
    file = tmp_path / "log.txt"
    for streams, words in (((other, known), "Came first, on another rank"), ((known, other), "Probably not the cause")):
        lines = [f"[rank{rank}]: {line}" for rank, stream in enumerate(streams) for line in stream]
        file.write_text("\n".join(lines) + "\n")
        run = doctor("explain", str(file))
        assert f"{words}: IndexError: 7" in run.stdout


def test_memory_that_was_not_allocated_is_fsdp1s_only_where_fsdp1_ran(tmp_path: pathlib.Path) -> None:
    raised = "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet."
    ran = '  File "/opt/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 854, in forward'
    used = '  File "/opt/me/value_head.py", line 31, in forward'
    compiled = '  File "/opt/torch/_inductor/runtime/triton_heuristics.py", line 1200, in run'
    of_fsdp2 = '  File "/opt/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 250, in _pre_forward'
    assert entry_of(explained(tmp_path, *[BEGIN, ran, used, raised])) == "fsdp1-freed-parameter-is-used"
    for others in ([used], [ran, compiled], [of_fsdp2, used]):
        assert entry_of(explained(tmp_path, *[BEGIN, *others, raised])) == ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (b"  \n\n", "is empty"), (b"\x7fELF\x00\x01\x02", "is not a text file"), (None, "cannot read")],
    ids=["empty", "blank", "binary", "missing"],
)
def test_what_is_no_log_is_refused_in_a_sentence(tmp_path: pathlib.Path, content: bytes | None, expected: str) -> None:
    file = tmp_path / "log.txt"
    if content is not None:
        file.write_bytes(content)
    run = doctor("explain", str(file))
    assert (run.code, run.stdout) == (2, "")
    assert expected in run.stderr
    assert "Traceback" not in run.stderr


def test_an_entry_can_be_printed_and_all_listed() -> None:
    assert "Remedy: " in doctor("explain", "summon-full-params-noop-on-fsdp2").stdout
    assert "fsdp2-pinned-policy-half-moved" in doctor("explain", "FD001").stdout.splitlines()[0]
    listed = doctor("explain", "--list").stdout.splitlines()
    assert len(listed) >= 45
    refused = doctor("explain", "summon-full-params")
    assert (refused.code, "did you mean" in refused.stderr) == (2, True)


def test_a_line_without_an_end_is_read_too(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("." * 3_000_000 + "\n" + "\n".join(traceback(UNSHARD.format(0))))
    assert entry_of(explain([file])) == _MANUAL


# What is printed


def _text(tmp_path: pathlib.Path, *lines: str) -> str:
    return text.render_text(explained(tmp_path, *lines), 10_000).replace(str(tmp_path), "logs")


@pytest.mark.parametrize(
    ("lines", "heading"),
    [
        ([UNSHARD.format(0)], "Root cause: logs/log.txt, line 1"),
        ([UNSHARD.format(0), "", UNSHARD.format(0)], "Root cause: logs/log.txt, line 1 (2 times)"),
        (
            [f"[rank{rank}]: {UNSHARD.format(0)}" for rank in (1, 0)],
            "Root cause: logs/log.txt, line 1 (rank 0, rank 1)",
        ),
        (
            [f"[rank{rank}]: {UNSHARD.format(0)}" for rank in range(11)],
            f"Root cause: logs/log.txt, line 1 ({', '.join(f'rank {rank}' for rank in range(8))} and 3 more)",
        ),
    ],
    ids=["once", "twice", "two ranks", "many ranks"],
)
def test_the_answer_is_followed_by_the_place_and_origin_of_the_cause(
    tmp_path: pathlib.Path, lines: list[str], heading: str
) -> None:
    answer, _, place, *_ = _text(tmp_path, *lines).splitlines()
    assert answer.startswith(("Known: ", "Likely: "))
    assert place == heading


def test_nothing_but_code_and_commands_is_wider_than_the_terminal(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, *traceback(UNSHARD.format(0)))
    entry = find_entry(_MANUAL)
    wide = [line for line in text.render_text(explanation, 80).splitlines() if len(line) > 80 and len(line.split()) > 1]
    assert [line for line in wide if "fsdp-doctor probe" not in line and line.strip() not in entry.code] == []


def test_what_followed_is_counted_by_what_it_is(tmp_path: pathlib.Path) -> None:
    closed = "RuntimeError: Connection closed by peer [127.0.0.1]:40214"
    timed_out = "RuntimeError: [buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    shown = _text(
        tmp_path, f"[rank0]: {UNSHARD.format(0)}", f"[rank1]: {closed}", f"[rank2]: {closed}", f"[rank3]: {timed_out}"
    )
    assert "Consequence: the connection to a rank that had ended was closed (2 times)\n" in shown
    assert "Consequence: a rank timed out while it waited for another\n" in shown


def test_possible_entries_are_at_most_three_lines_without_cause_or_remedy(tmp_path: pathlib.Path) -> None:
    shown = _text(tmp_path, "strategy: fsdp", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    possible = shown.split("Possible")[1].splitlines()[1:]
    assert possible[0].startswith("  dsd-load-oom-broadcast: does the traceback go through set_model_state_dict")
    assert len([line for line in possible if line.startswith("  ") and ": " in line]) == 3
    assert "Known: " not in shown
    assert "Remedy: " not in shown


def test_what_is_not_sure_of_an_entry_stands_above_its_remedy(tmp_path: pathlib.Path) -> None:
    shown = _text(tmp_path, "FSDP parameters should be materialized on CPU when enabling CPU offloading")
    assert shown.index("To be sure:") < shown.index("Remedy: ")


def test_the_remedy_for_the_framework_in_the_traceback_comes_first(tmp_path: pathlib.Path) -> None:
    lines = traceback(STORAGE.format(0))
    shown = _text(tmp_path, *lines)
    assert shown.index("Remedy in verl: ") < shown.index("Remedy: ")
    assert "Remedy in verl: " not in _text(tmp_path, *(line.replace("verl", "mine") for line in lines))


def test_the_second_line_for_a_known_failure_is_its_remedy_shown_once(tmp_path: pathlib.Path) -> None:
    lines = traceback(STORAGE.format(0))
    shown = _text(tmp_path, *lines)
    assert shown.splitlines()[1].startswith("Remedy in verl: ")
    assert shown.count("Remedy in verl: ") == 1
    assert _text(tmp_path, *(line.replace("verl", "mine") for line in lines)).splitlines()[1].startswith("Remedy: ")


def test_a_log_that_names_fsdp_is_told_from_one_that_does_not(tmp_path: pathlib.Path) -> None:
    lines = ["actor.strategy=fsdp2", BEGIN, '  File "/opt/data.py", line 3, in f', "ValueError: bad row"]
    assert explained(tmp_path, *lines).under_fsdp
    assert not explained(tmp_path, *lines[1:]).under_fsdp


def test_standard_input_is_read_to_its_end_and_named_as_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"step\n" * 400_000 + "\n".join(traceback(UNSHARD.format(0))).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    explanation = json.loads(text.render_json(explain([None])))
    assert (explanation["matched"], explanation["cause"]["file"], explanation["cause"]["line"]) == (
        True,
        "standard input",
        400_006,
    )


def test_a_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed; give a file instead of -"):
        explain([None])


def test_conditions_that_the_log_meets_are_not_printed_again(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, *traceback(STORAGE.format(0)))
    assert explanation.entry is not None
    assert explanation.entry.needs
    assert "Only if " not in text.render_text(explanation, 10_000)
    assert "Only if " in "\n".join(text.render_entry(explanation.entry, 10_000))
