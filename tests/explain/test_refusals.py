"""What refused what is read from the form of a traceback, and which line of the job asked for it."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, explained

from fsdp_doctor.explain import text
from fsdp_doctor.explain.mechanisms import Reading

_SITE = "/env/lib/python3.12/site-packages"
_SHARD = [
    BEGIN,
    '  File "/home/u/job/fit.py", line 40, in main',
    "    fully_shard(model, reshard_after_forward=3)",
    f'  File "{_SITE}/torch/distributed/_composable/contract.py", line 152, in wrapper',
    "    updated = func(inp_module, *args, **kwargs)",
    f'  File "{_SITE}/torch/distributed/fsdp/_fully_shard/_fully_shard.py", line 243, in fully_shard',
    "    check(mesh)",
    f'  File "{_SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_init.py", line 80, in check',
    "    raise ValueError(",
    "ValueError: If passing reshard_after_forward as an int, it should be a factor of 2, not 3",
]


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    reading = explained(tmp_path, *lines).reading
    assert reading is not None
    return reading


def test_a_refused_argument_is_named_with_the_line_that_passed_it(tmp_path: pathlib.Path) -> None:
    reading = _read(tmp_path, *_SHARD)
    assert reading.clash.startswith("`fully_shard` refuses the argument `reshard_after_forward`: ")
    assert "factor of 2, not 3" in reading.clash
    assert "fit.py, line 40 (`fully_shard(model, reshard_after_forward=3)`)" in reading.decide
    assert reading.who == "torch's FSDP2"


def test_a_prefixed_or_boxed_traceback_has_the_same_reading(tmp_path: pathlib.Path) -> None:
    boxed = [
        "╭───────────────────── Traceback (most recent call last) ─────────────────────╮",
        "│ /home/u/job/fit.py:40 in main                                               │",
        "│                                                                             │",
        "│   39                                                                        │",
        "│ ❱ 40     fully_shard(model, reshard_after_forward=3)                        │".replace("40   ", "40 │ "),
        "╰─────────────────────────────────────────────────────────────────────────────╯",
    ]
    ray = [f"(WorkerDict pid=31, ip=10.0.0.1) {line}" for line in _SHARD]
    assert _read(tmp_path, *ray).clash == _read(tmp_path, *_SHARD).clash
    assert explained(tmp_path, *boxed, _SHARD[-1]).cause is not None
    cause = explained(tmp_path, *boxed, _SHARD[-1]).cause
    assert cause is not None
    assert list(cause.first.code_of.values()) == ["fully_shard(model, reshard_after_forward=3)"]


def test_a_check_within_a_step_is_no_refused_argument(tmp_path: pathlib.Path) -> None:
    lines = [
        *(BEGIN, '  File "/home/u/job/fit.py", line 9, in main', "    loss.backward()"),
        *(f'  File "{_SITE}/torch/_tensor.py", line 5, in backward', "    torch.autograd.backward("),
        f'  File "{_SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", line 7, in reduce',
        "    raise AssertionError(",
        "AssertionError: Expects unsharded_param.grad to not be None",
    ]  # fmt: skip
    reading = _read(tmp_path, *lines)
    assert "a check in `reduce` of torch's FSDP2 fails" in reading.clash
    assert "refuses" not in reading.clash
    assert "fit.py, line 9" in reading.decide


def test_an_operation_refused_in_c_is_named_with_the_jobs_line(tmp_path: pathlib.Path) -> None:
    lines = [
        *(BEGIN, '  File "/home/u/job/fit.py", line 9, in main', "    model(batch)"),
        *(f'  File "{_SITE}/torch/nn/functional.py", line 7, in embed', "    return torch.embedding(weight, ids)"),
        "RuntimeError: tensor 1 has too few elements for its strides",
    ]
    reading = _read(tmp_path, "strategy: fsdp", *lines)
    assert "`return torch.embedding(weight, ids)` in `embed` fails: tensor 1 has too few" in reading.clash
    assert "fit.py, line 9 (`model(batch)`)" in reading.decide


def test_an_operation_in_a_line_of_the_job_is_named(tmp_path: pathlib.Path) -> None:
    lines = [BEGIN, '  File "/home/u/job/fit.py", line 9, in main', "    weight.add_(1.0)"]
    reading = _read(tmp_path, "strategy: fsdp", *lines, "RuntimeError: a leaf Variable that requires grad is in use")
    assert "the operation `weight.add_(1.0)` in `main` fails" in reading.clash


@pytest.mark.parametrize("form", ["carrier", "chain"])
def test_the_line_of_the_job_is_taken_from_what_carried_the_exception(tmp_path: pathlib.Path, form: str) -> None:
    outer = [
        *(BEGIN, '  File "/home/u/job/fit.py", line 9, in main', "    dcp.save(state, planner='default')"),
        *(f'  File "{_SITE}/torch/distributed/checkpoint/utils.py", line 221, in reduce_scatter', "    raise result"),
    ]
    inner = [
        f'  File "{_SITE}/torch/distributed/checkpoint/saver.py", line 44, in local_step',
        *("    planner.set_up_planner(state)", "AttributeError: 'str' object has no attribute 'set_up_planner'"),
    ]
    carried = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])"
    chain = "The above exception was the direct cause of the following exception:"
    lines = {
        "carrier": [*outer, carried, f"{BEGIN} (RANK 0)", *inner],
        "chain": [BEGIN, *inner, "", chain, "", *outer, "RuntimeError: the save failed"],
    }[form]
    explanation = explained(tmp_path, *lines)
    assert explanation.cause is not None
    assert explanation.cause.first.type == "AttributeError"
    assert explanation.reading is not None
    assert "fit.py, line 9 (`dcp.save(state, planner='default')`)" in explanation.reading.decide


def test_metadata_that_cannot_be_read_is_not_called_absent(tmp_path: pathlib.Path) -> None:
    read = [
        BEGIN,
        f'  File "{_SITE}/torch/distributed/checkpoint/state_dict_loader.py", line 234, in local_step',
        f'  File "{_SITE}/torch/distributed/checkpoint/filesystem.py", line 930, in read_metadata',
    ]
    lines = [*read, "EOFError: Ran out of input", *read, "FileNotFoundError: [Errno 2] No such file or directory: "]
    lines[-1] += "'/c/__0.metadata'"
    joined = (
        "AssertionError: metadata is None; global metadata read failed: Ran out of input; rank local metadata read "
        "failed"
    )
    explanation = explained(tmp_path, *lines, *read[:2], joined)
    assert explanation.entry is None
    assert explanation.reading is not None
    assert "a file is incomplete (EOFError: Ran out of input)" in explanation.reading.clash


def test_a_lookup_of_an_optimizers_parameter_is_read_as_such(tmp_path: pathlib.Path) -> None:
    lines = [
        *(BEGIN, '  File "/home/u/job/fit.py", line 9, in save', "    get_optimizer_state_dict(model, optimizer)"),
        f'  File "{_SITE}/torch/distributed/checkpoint/state_dict.py", line 960, in get_optimizer_state_dict',
        *("    name = names_by_number[key]", "KeyError: 0"),
    ]
    reading = _read(tmp_path, *lines)
    assert "the optimizer and the model do not have the same parameters" in reading.clash
    assert "examine(model, optimizer)" in reading.decide


@pytest.mark.parametrize(
    "raised",
    [
        "ImportError: cannot import name '_lazy' from 'torch.distributed.fsdp._runtime_utils' (/env/x.py)",
        "AttributeError: module 'torch.distributed.fsdp._runtime_utils' has no attribute '_lazy'",
        "ModuleNotFoundError: No module named 'torch.distributed.fsdp._runtime_utils._lazy'",
        "AttributeError: 'FSDPParamGroup' object has no attribute '_lazy'",
    ],
    ids=["import", "attribute", "module", "object"],
)
def test_a_private_name_that_is_gone_names_both_packages_with_versions(tmp_path: pathlib.Path, raised: str) -> None:
    lines = [
        "accelerate 0.21.0, PyTorch version: 2.13.0",
        *(BEGIN, '  File "/home/u/job/fit.py", line 3, in <module>', "    from accelerate import Accelerator"),
        *(f'  File "{_SITE}/accelerate/utils/fsdp_utils.py", line 22, in prepare', "    return _lazy()"),
        raised,
    ]
    reading = _read(tmp_path, *lines)
    assert "accelerate 0.21.0" in reading.clash
    assert "torch 2.13.0" in reading.clash
    assert "_lazy" in reading.clash
    assert "fsdp-doctor env" in reading.decide


def test_a_call_between_packages_with_other_arguments_is_one_of_versions(tmp_path: pathlib.Path) -> None:
    frame = f'  File "{_SITE}/accelerate/utils/fsdp_utils.py", line 22, in prepare'
    raised = "TypeError: _lazy() missing 1 required positional argument: 'state'"
    reading = _read(tmp_path, "accelerate 0.21.0", BEGIN, frame, "    return _lazy()", raised)
    assert "accelerate 0.21.0 calls _lazy with other arguments than it takes (missing 1" in reading.clash
    assert "fsdp-doctor env" in reading.decide


def test_a_name_of_fsdp1_on_an_fsdp2_module_clashes_no_versions(tmp_path: pathlib.Path) -> None:
    lines = [
        *(BEGIN, '  File "/home/u/job/fit.py", line 9, in save', "    model._fsdp_wrapped_module.state_dict()"),
        *(f'  File "{_SITE}/torch/nn/modules/module.py", line 7, in __getattr__', "    raise AttributeError("),
        "AttributeError: 'FSDPToy' object has no attribute '_fsdp_wrapped_module'",
    ]
    reading = _read(tmp_path, *lines)
    assert "of FSDP1" in reading.clash
    assert "versions" not in reading.decide


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("ValueError: fully_shard doesn't support scalar parameters. Change scale.", "`fully_shard` refuses the call"),
        ("ValueError: loaded state dict has a different number of parameter groups", "parameter groups"),
        ("RuntimeError: .numpy() is not supported for tensor subclasses.", "none of its own"),
        ("NotImplementedError: Operator aten.unfold_copy.default does not have a sharding strategy registered.",
         "aten.unfold_copy.default"),
        ("RuntimeError: Output 0 of View is a view and its base or another view of its base has been modified inplace.",
         "flat parameter"),
        ("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'", "cannot be pickled"),
        ("AssertionError: No `FlatParameter` in `state_dict` for this FSDP instance", "other units"),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16", "Float and BFloat16"),
        ("ValueError: Target modules {'q_proj'} not found in the base model.", "q_proj"),
        ("RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk: [{'head', 'embed'}].",
         "'head', 'embed'"),
        ('RuntimeError: Error(s) in loading state_dict for Toy: Missing key(s) in state_dict: "fc.a", "fc.b". '
         'Unexpected key(s) in state_dict: "ema.fc.a", "ema.fc.b".', "prefix ema."),
    ],
)  # fmt: skip
def test_a_message_alone_is_read_by_its_mechanism(tmp_path: pathlib.Path, raised: str, words: str) -> None:
    reading = _read(tmp_path, "strategy: fsdp", raised)
    assert words in reading.clash
    assert reading.decide


@pytest.mark.parametrize(
    "carrier",
    [
        ["RuntimeError: Caught RuntimeError in DataLoader worker process 0.", f"Original {BEGIN}"],
        ["torch.multiprocessing.spawn.ProcessRaisedException: ", "",
         "-- Process 1 terminated with the following error:", BEGIN],
    ],
    ids=["data loader", "spawn"],
)  # fmt: skip
def test_the_exception_of_a_worker_is_read_and_not_its_carrier(tmp_path: pathlib.Path, carrier: list[str]) -> None:
    outer = [BEGIN, '  File "/home/u/job/fit.py", line 30, in <module>', "    run()", *carrier]
    explanation = explained(tmp_path, *outer, *_SHARD[1:])
    assert explanation.cause is not None
    assert explanation.cause.first.message.startswith("If passing")
    assert explanation.reading is not None
    assert "`fully_shard` refuses" in explanation.reading.clash


@pytest.mark.parametrize(
    ("lines", "clash", "decide"),
    [
        (["{'loss': '1.81'}", "Loading model from /c", "{'loss': '7.94'}"], "loss is 7.94", "fsdp-doctor resume"),
        (["kl=0.002", "weight sync done in 4 s", "kl=4.81"], "kl is 4.81 at the first step after", "fingerprint"),
        (["After I resume the loss goes from 1.82 to 11.4."], "from 1.82 to 11.4", "fsdp-doctor resume"),
        (["Resuming from checkpoint-500", "Continuing training from global step 0"], "step 500", "fsdp-doctor resume"),
        (["[rank0]: Saving checkpoint to /c/a-12/step_100", "[rank1]: Saving checkpoint to /c/a-13/step_100"],
         "rank 1 to /c/a-13/step_100", "broadcast"),
        ([*(f"[rank{rank}]: saving checkpoint" for rank in range(4)), "[rank0]: checkpoint saved",
          "[rank2]: checkpoint saved"], "rank 0, rank 2 ended the save, rank 1, rank 3 did not", "py-spy"),
        (["_IncompatibleKeys(missing_keys=['a.b.w'], unexpected_keys=['_fsdp_wrapped_module.a.b.w'])"],
         "prefix _fsdp_wrapped_module., which FSDP1 adds", "checkpoint verify"),
        (["keys in file: ['module.a.w', 'module.b.w']", "keys in model: ['a.w', 'b.w']"], "prefix module.", "verify"),
        ([f"rank {rank}: checksum of embed after load: {value}" for rank, value in enumerate(("0x9a", "0x9a", "0x00"))],
         "rank 2 has 0x00", "fingerprint"),
        ([f"Rank {rank} memory after wrap: {size} GB" for rank, size in enumerate((15.2, 3.8, 3.8))],
         "rank 0 has 15.2 GB", "map_location"),
        (["|  0   1001  python   78211MiB |", "|  0   1002  python   1412MiB |", "|  1   1002  python   21201MiB |"],
         "GPU 0 holds memory of 1 processes", "set_device"),
        (["lm_head.weight | MISMATCH | Reinit - ckpt: torch.Size([64, 16]) vs model:torch.Size([68, 16])"],
         "[64, 16] in the checkpoint, and [68, 16]", "config.json"),
        (["It runs, but the weights are not updated by the optimizer."], "does not change the weights", "examine"),
        (["expected 291 tensors, got 146 tensors in update_weights"], "146 of 291", "fingerprint"),
        (["Nothing is printed once save_state is called; only rank 0 calls it."], "only rank 0 calls", "py-spy"),
        (["After the save the job hangs forever, all GPUs at 100%."], "does not go on", "py-spy"),
    ],
    ids=[
        *("quoted loss", "kl", "told loss", "step 0", "two names", "some ranks", "incompatible keys", "two lists"),
        *("checksums", "memory", "GPU 0", "load report", "no update", "not all", "one rank", "hang"),
    ],
)  # fmt: skip
def test_a_symptom_of_several_lines_or_in_prose_is_read(
    tmp_path: pathlib.Path, lines: list[str], clash: str, decide: str
) -> None:
    explanation = explained(tmp_path, "strategy: fsdp", *lines)
    assert explanation.showing == "nothing"
    assert explanation.reading is not None
    assert clash in explanation.reading.clash
    assert decide in explanation.reading.decide


@pytest.mark.parametrize(
    "lines",
    [
        [*(f"[rank{rank}]: saving checkpoint" for rank in range(2)), "[rank0]: checkpoint saved"],
        [*(f"[rank{rank}]: {word}" for word in ("saving", "saved") for rank in range(3))],
        ["_IncompatibleKeys(missing_keys=[], unexpected_keys=[])"],
        ["weight sync done in 4 s", "kl=0.05"],
        [f"rank {rank}: checksum of this rank's shard: 0x{rank}a" for rank in range(3)],
        [f"Rank {rank} memory: {size} GB" for rank, size in enumerate((4.2, 3.8, 3.9))],
        ["Resuming from checkpoint-500", "Continuing training from global step 500"],
        ["keys in file: ['a.w', 'b.w']", "keys in model: ['a.w', 'b.w']"],
        ["expected 291 tensors in 4 files"],
    ],
    ids=["rank 0 writes", "all save", "no keys", "no sync", "shards", "even", "step 500", "same keys", "no number"],
)  # fmt: skip
def test_what_ranks_usually_say_is_no_symptom(tmp_path: pathlib.Path, lines: list[str]) -> None:
    assert explained(tmp_path, "strategy: fsdp", *lines).reading is None


def test_a_failure_of_one_rank_is_not_known_where_several_raised_it(tmp_path: pathlib.Path) -> None:
    def log(ranks: int) -> list[str]:
        frame = f'  File "{_SITE}/torch/distributed/checkpoint/state_dict.py", line 9, in set_model_state_dict'
        raised = 'RuntimeError: Error(s) in loading state_dict for FSDPToy: Unexpected key(s) in state_dict: "extra.w".'
        return [f"[rank{rank}]: {line}" for rank in range(ranks) for line in (BEGIN, frame, "    load(", raised)]

    alone, together = (explained(tmp_path, *log(ranks)) for ranks in (1, 2))
    assert alone.entry is not None
    assert together.entry is None
    assert "only one does" in text.render_text(together, 1000)
