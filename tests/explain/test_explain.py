"""``fsdp-doctor explain``: the root cause out of logs as they come, and what is said where nothing is known."""

from __future__ import annotations

import pathlib
import random

import pytest
from support.inside import doctor
from support.written_logs import BEGIN, DURING, UNSHARD, entry_of, explained

from fsdp_doctor.explain import Explanation, explain

_STORAGE = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"cuda:{}".  This is no longer allowed; the devices must match.'
)


def _traceback(raised: str) -> list[str]:
    return [
        BEGIN,
        '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in rollout_mode',
        "    params = self.actor_module_fsdp.state_dict()",
        '  File "/opt/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 2256, in state_dict',
        "    hook(self, prefix, keep_vars)",
        raised,
    ]


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
    streams = [[f"[rank{rank}]: {line}" for line in _traceback(_STORAGE.format(rank % 8))] for rank in range(64)]
    explanation = explained(tmp_path, _interleaved(streams, seed))
    assert entry_of(explanation) == "fsdp2-pinned-policy-half-moved"
    assert _sources(explanation) == {f"rank {rank}" for rank in range(64)}


def test_what_followed_on_other_ranks_is_not_the_cause_though_it_comes_first_in_the_log(tmp_path: pathlib.Path) -> None:
    cascade = "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40214"
    watchdog = (
        "[rank2]:[E1121 12:34:56.789 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=512, OpType=_ALLGATHER_BASE)"
    )
    lines = [cascade, watchdog, *(f"[rank0]: {line}" for line in _traceback(UNSHARD.format(0)))]
    explanation = explained(tmp_path, lines)
    assert (entry_of(explanation), _sources(explanation)) == ("fsdp1-manual-offload-then-state-dict", {"rank 0"})
    assert sum(explanation.consequences.values()) == 2


def test_time_stamps_decide_where_the_logs_of_ranks_stand_one_after_the_other(tmp_path: pathlib.Path) -> None:
    late = ["2026-04-13 10:00:09,000 INFO sync", *_traceback(UNSHARD.format(0))]
    early = ["2026-04-13 10:00:01,500 INFO sync", *_traceback(_STORAGE.format(1))]
    files = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    for file, lines in zip(files, (late, early), strict=True):
        file.write_text("\n".join(lines) + "\n")
    explanation = explain(files)
    assert entry_of(explanation) == "fsdp2-pinned-policy-half-moved"
    assert explanation.cause is not None
    assert explanation.cause.first.file == str(files[1])


def test_rays_prefixes_and_colours_are_taken_off_whether_or_not_the_escape_survived(tmp_path: pathlib.Path) -> None:
    for colour in ("\x1b[36m{}\x1b[0m ", "[36m{}[0m "):
        prefix = colour.format("(WorkerDict pid=812, ip=10.0.0.1)")
        other = colour.format("(WorkerDict pid=813, ip=10.0.0.1)")
        streams = [[prefix + line for line in _traceback(_STORAGE.format(0))]]
        streams += [[other + line for line in _traceback(_STORAGE.format(1))]]
        explanation = explained(tmp_path, _interleaved(streams))
        assert entry_of(explanation) == "fsdp2-pinned-policy-half-moved"
        assert _sources(explanation) == {"pid 812 on 10.0.0.1", "pid 813 on 10.0.0.1"}


def test_rays_wrapper_is_not_taken_for_the_exception_that_it_carries(tmp_path: pathlib.Path) -> None:
    lines = [
        "ray.exceptions.RayTaskError(AssertionError): ray::WorkerDict.compute_log_prob() (pid=618, ip=10.0.0.1)",
        '  File "/opt/verl/verl/single_controller/ray/base.py", line 399, in func',
        "    return getattr(self.worker_dict[key], name)(*args, **kwargs)",
        UNSHARD.format(0) + " [repeated 7x across cluster]",
    ]
    explanation = explained(tmp_path, lines)
    assert entry_of(explanation) == "fsdp1-manual-offload-then-state-dict"
    assert explanation.cause is not None
    assert explanation.cause.first.text == UNSHARD.format(0)
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
    assert explanation.matches[0].entry.id == "fsdp2-pinned-policy-half-moved"
    assert explanation.grade == ("known" if "fsdp_workers.py" in text else "possible")


def test_the_rank_that_torchrun_saw_fail_first_is_believed(tmp_path: pathlib.Path) -> None:
    lines = [
        *(f"[rank0]: {line}" for line in _traceback(UNSHARD.format(0))),
        *(f"[rank3]: {line}" for line in _traceback(_STORAGE.format(3))),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_12:34:56",
        "  host      : localhost",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 4229)",
    ]
    explanation = explained(tmp_path, lines)
    assert (entry_of(explanation), _sources(explanation)) == ("fsdp2-pinned-policy-half-moved", {"rank 3"})
    assert explanation.summary is not None
    assert explanation.summary.sentence == "torchrun saw rank 3 fail first, with exit code 1"


def test_a_rank_that_was_killed_without_a_word_is_told_from_torchruns_summary(tmp_path: pathlib.Path) -> None:
    lines = ["Root Cause (first observed failure):", "  rank      : 1 (local_rank: 1)", "  exitcode  : -9 (pid: 4229)"]
    file = tmp_path / "log.txt"
    file.write_text("\n".join(lines))
    run = doctor("explain", str(file))
    assert run.code == 1
    assert "torchrun saw rank 1 fail first, with SIGKILL" in run.stdout


def test_an_unknown_exception_before_a_known_one_is_said(tmp_path: pathlib.Path) -> None:
    lines = [*_traceback("ImportError: cannot import name 'flash_attn_func'"), *_traceback(UNSHARD.format(0))]
    explanation = explained(tmp_path, lines)
    assert entry_of(explanation) == "fsdp1-manual-offload-then-state-dict"
    assert [other.type for other in explanation.others] == ["ImportError"]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["worker-0  | " + line for line in _traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        (["[pod/job-0/pytorch] " + line for line in _traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        ([">" + line for line in _traceback(UNSHARD.format(0))], UNSHARD.format(0)),
        (_traceback("mypkg.SyncAborted: no"), "SyncAborted: no"),
        (_traceback("_queue.Empty"), "Empty"),
        (["FutureWarning: old", "loss/MeanSquaredError: 0.123", *_traceback("TypeError: bad")], "TypeError: bad"),
        (["WARNING ImportError: No module named flash_attn", *_traceback("TypeError: bad")], "TypeError: bad"),
        (
            [*_traceback("KeyError: 'x'"), "", DURING, "", *_traceback("ValueError: no x")],
            "ValueError: no x",
        ),
        (
            ["RuntimeError: [buffer.cc:81] Timed out waiting 1800000ms for recv", *_traceback("IndexError: 1")],
            "IndexError: 1",
        ),
        (_traceback("KeyboardInterrupt") + _traceback("ValueError: SIGTERM handler"), "ValueError: SIGTERM handler"),
        (
            [
                f"ValueError: cannot decode {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}"
                for i in range(2500)
            ]
            + _traceback(UNSHARD.format(0)),
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
    explanation = explained(tmp_path, lines)
    assert explanation.cause is not None
    assert explanation.cause.first.text == cause


def test_long_tracebacks_of_64_interleaved_ranks_keep_their_frames(tmp_path: pathlib.Path) -> None:
    deep = [f'  File "/opt/a{i}.py", line {i}, in f{i}' for i in range(38)]
    last = '  File "/opt/torch/distributed/tensor/_api.py", line 500, in full_tensor'
    raised = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    streams = [[f"[rank{rank}]: {line}" for line in (BEGIN, *deep, last, raised)] for rank in range(64)]
    assert entry_of(explained(tmp_path, _interleaved(streams))) == "full-gather-runs-out-of-memory"


def test_holes_that_a_truncated_log_has_are_no_binary_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_bytes(b"INFO a line\n" * 50 + b"\0" * 20 + "\n".join(_traceback(UNSHARD.format(0))).encode())
    assert entry_of(explain([file])) == "fsdp1-manual-offload-then-state-dict"


def test_where_only_consequences_are_in_the_log_that_is_said(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:40214\n")
    run = doctor("explain", str(file))
    assert "The log has only consequences of a failure elsewhere" in run.stdout
    assert "The rank that failed or hung first is not in this log" in run.stdout


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
    assert "killed for want of host memory" in run.stdout
    assert "log.txt, line 2" in run.stdout
    assert "is not in this log" not in run.stdout


@pytest.mark.parametrize(
    "words", ["the zoom-kill event of the dataset", "set vm.overcommit so that no OOM comes", "torch: out of memory?"]
)
def test_words_of_memory_alone_are_no_process_that_was_killed(tmp_path: pathlib.Path, words: str) -> None:
    assert not explained(tmp_path, [words, *_traceback(UNSHARD.format(0))]).killed_for_memory


def test_what_ended_another_rank_before_the_known_failure_is_not_called_no_cause(tmp_path: pathlib.Path) -> None:
    other = [BEGIN, '  File "/opt/me/reward.py", line 8, in score', "    return table[answer]", "IndexError: 7"]
    known = _traceback(UNSHARD.format(0))
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
    assert entry_of(explained(tmp_path, [BEGIN, ran, used, raised])) == "fsdp1-freed-parameter-is-used"
    for others in ([used], [ran, compiled], [of_fsdp2, used]):
        assert entry_of(explained(tmp_path, [BEGIN, *others, raised])) == ""


def test_what_is_not_known_is_said_with_what_is_near_and_what_to_attach(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text(
        "\n".join(_traceback("RuntimeError: cannot set the storage of a tensor, a different storage is held"))
    )
    run = doctor("explain", str(file))
    assert run.code == 1
    assert "It is not in the catalogue of known failures." in run.stdout
    assert (
        "fsdp2-pinned-policy-half-moved"
        in run.stdout.split("Entries with a similar message")[1].split("To report it")[0]
    )
    assert "fsdp-doctor env" in run.stdout.split("To report it, attach:")[1]


def test_a_match_prints_cause_remedy_code_references_and_the_case(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("\n".join(_traceback(_STORAGE.format(0))))
    run = doctor("explain", str(file))
    assert run.code == 0
    for part in (
        "Root cause: ",
        "Cause: ",
        "Remedy: ",
        "full_tensor()",
        "verl-project/verl#5995",
        "in rollout_mode",
    ):
        assert part in run.stdout
    assert "Reproduce: fsdp-doctor probe --case 'fsdp2/policy/staged/state_dict'" in run.stdout


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
    assert "Remedy: " in doctor("explain", "--entry", "summon-full-params-noop-on-fsdp2").stdout
    listed = doctor("explain", "--list").stdout.splitlines()
    assert len(listed) >= 45
    refused = doctor("explain", "--entry", "summon-full-params")
    assert (refused.code, "did you mean" in refused.stderr) == (2, True)


def test_a_line_without_an_end_is_read_too(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("." * 3_000_000 + "\n" + "\n".join(_traceback(UNSHARD.format(0))))
    assert entry_of(explain([file])) == "fsdp1-manual-offload-then-state-dict"
