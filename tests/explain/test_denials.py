"""``explain`` denies nothing and calls nothing known that the log does not show."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, entry_of, explained

from fsdp_doctor.explain import text

_SITE = "/env/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("lines", "foreign"),
    [
        (
            [BEGIN, f'  File "{_SITE}/torch/utils/data/_utils/fetch.py", line 52, in fetch', "KeyError: 'labels'"],
            "data",
        ),
        (
            [
                BEGIN,
                '  File "/app/fit.py", line 3, in main',
                "    raise ValueError(f'bad row {i}')",
                "ValueError: bad row 7",
            ],
            "own code",
        ),
        ([BEGIN, '  File "/app/fit.py", line 3, in main', "NameError: name 'epohcs' is not defined"], "own code"),
        (["OSError: [Errno 28] No space left on device"], "disk"),
        (
            ["slurmstepd: error: *** STEP 71.0 ON n3 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***"],
            "time limit",
        ),
        ([BEGIN, '  File "/opt/llamafactory/data/converter.py", line 9, in convert', "KeyError: 'messages'"], "data"),
        (
            [BEGIN, '  File "/opt/slime/utils/arguments.py", line 9, in parse', "ValueError: no such mode"],
            "configuration",
        ),
        ([BEGIN, '  File "/opt/swift/llm/template/base.py", line 9, in encode', "IndexError: 7"], "template"),
    ],
    ids=[
        *("data", "a script's own error", "a mistake", "disk", "time limit"),
        *("a framework's data", "a framework's arguments", "a framework's template"),
    ],
)
def test_a_cause_that_is_not_fsdps_is_denied_where_it_was_read(
    tmp_path: pathlib.Path, lines: list[str], foreign: str
) -> None:
    explanation = explained(tmp_path, *lines)
    assert (explanation.showing, explanation.about_fsdp) == ("failure", False)
    assert foreign in explanation.foreign


@pytest.mark.parametrize(
    "lines",
    [
        ["[rank1]: RuntimeError: Missing key in checkpoint state_dict: head.weight."],
        ["[rank5]: NotImplementedError: aten.lerp.Scalar: DTensor does not support cross-mesh operation yet!"],
        ["saving SHARDED_STATE_DICT", "FileNotFoundError: [Errno 2] No such file or directory: '/c/__3_0.distcp'"],
        [BEGIN, '  File "/app/fit.py", line 8, in restore', "KeyError: 'exp_avg'"],
        [BEGIN, '  File "/app/fit.py", line 8, in restore', "    raise ValueError(name)", "ValueError: shard 3 of 4"],
        [BEGIN, f'  File "{_SITE}/einops/einops.py", line 8, in rearrange', "RuntimeError: shape '[64, 3]' is invalid"],
        ["torch.AcceleratorError: CUDA error: an illegal memory access was encountered"],
        ["torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])"],
        [
            f'  File "{_SITE}/safetensors/torch.py", line 18, in storage_ptr',
            "RuntimeError: Attempted to access the data pointer on an invalid python storage.",
        ],
    ],
    ids=["key", "mesh", "shard's file", "state", "own message", "shape", "kernel", "carrier", "storage"],
)
def test_a_failure_whose_cause_was_not_read_is_not_denied(tmp_path: pathlib.Path, lines: list[str]) -> None:
    explanation = explained(tmp_path, *lines)
    assert (explanation.showing, explanation.foreign) == ("failure", "")
    assert not text.render_text(explanation, 1000).startswith("No failure")


def test_a_step_of_bitsandbytes_optimizer_is_no_forward(tmp_path: pathlib.Path) -> None:
    mixed = "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling"
    explanation = explained(
        tmp_path,
        BEGIN,
        '  File "/app/fit.py", line 12, in <module>',
        f'  File "{_SITE}/bitsandbytes/optim/adamw.py", line 70, in update_step',
        f'  File "{_SITE}/bitsandbytes/functional.py", line 92, in optimizer_update_8bit_blockwise',
        f"RuntimeError: bitsandbytes.optimizer_update_8bit_blockwise.default: {mixed} distributed operators!",
    )
    assert entry_of(explanation) == "dtensor-mixed-in-optimizer"


@pytest.mark.parametrize("marked", [False, True])
def test_a_line_of_code_above_a_message_says_where_it_was_raised(tmp_path: pathlib.Path, marked: bool) -> None:
    lines = ["[rank3]:     whole = weight.data.full_tensor()", *(["[rank3]:             ^^^^^^^^^"] if marked else [])]
    raised = "[rank3]: RuntimeError: No backend type associated with device type cpu"
    assert entry_of(explained(tmp_path, *lines, raised)) == "full-tensor-cpu-shard-nccl-only"
    assert entry_of(explained(tmp_path, lines[0].replace("3", "2"), raised)) == ""
    assert entry_of(explained(tmp_path, "[rank3]: call full_tensor() on every rank", raised)) == ""


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("optimizer.state.0.step", "dcp-template-asks-for-more"),
        ("optim.param_groups.layers.0.weight.lr", "dcp-template-asks-for-more"),
        ("model.blocks.3.mlp.fc_in.weight", "dcp-checkpoint-lacks-a-weight"),
        ("dataloader.dp_rank_12", "resume-on-more-ranks-lacks-their-entries"),
        ("loader.dp_rank_0.stage.cursor", ""),
        ("model.layers.0.attn._extra_state", ""),
        ("scheduler.last_epoch", ""),
    ],
)
def test_a_key_that_a_checkpoint_lacks_is_told_by_its_name(tmp_path: pathlib.Path, key: str, entry: str) -> None:
    planner = f'  File "{_SITE}/torch/distributed/checkpoint/default_planner.py", line 428, in create_local_plan'
    explanation = explained(tmp_path, BEGIN, planner, f"RuntimeError: Missing key in checkpoint state_dict: {key}.")
    assert entry_of(explanation) == entry
    weight = entry == "dcp-checkpoint-lacks-a-weight"
    assert not (weight and "allow_partial_load" in text.render_text(explanation, 1000))


def test_the_first_failed_rank_is_shown_if_the_log_names_it(tmp_path: pathlib.Path) -> None:
    closed = "[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:40214"
    summary = ["Root Cause (first observed failure):", "  rank      : 3 (local_rank: 3)", "  exitcode  : 1 (pid: 9)"]
    shown = text.render_text(explained(tmp_path, closed, *summary), 1000)
    assert "rank 3" in shown.partition("The original failure")[2]


@pytest.mark.parametrize(
    "carrier",
    [
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
    ids=["group", "pool"],
)
def test_an_exception_that_carries_others_is_the_cause_only_alone(tmp_path: pathlib.Path, carrier: str) -> None:
    outer = [BEGIN, '  File "/app/fit.py", line 30, in main', carrier]
    inner = [BEGIN, f'  File "{_SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_init.py", line 50, in _init']
    together = explained(tmp_path, *outer, *inner, "ValueError: mesh is of 3 dimensions")
    assert together.cause is not None
    assert together.cause.first.type == "ValueError"
    assert list(together.consequences.values()) == [1]
    alone = explained(tmp_path, *outer)
    assert alone.cause is not None
    assert alone.cause.first.text.split(":")[0].endswith(("ExceptionGroup", "BrokenProcessPool"))
    assert alone.showing == "failure"
