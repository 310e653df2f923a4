"""Failures of one kind are told apart by what the message, the frames and the circumstances show."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, explained

from fsdp_doctor.explain.mechanisms import Reading
from fsdp_doctor.explain.text import render_text

_SITE = "/env/lib/python3.12/site-packages"
_MIXED = "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before distributed operators!"
_DIFFERENT = (
    "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata"
)


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    reading = explained(tmp_path, *lines).reading
    assert reading is not None
    return reading


def _describe(shape: str, dtype: str) -> str:
    return f"{{'shape': torch.Size([{shape}]), 'dtype': torch.{dtype}, 'device': device(type='cuda', index=0)}}"


def _describe_sizes(a: int, b: int) -> str:
    return (
        f"RuntimeError: The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension 0"
    )


@pytest.mark.parametrize(
    ("operation", "clash"),
    [
        ("aten.baddbmm.default", "a weight is still a DTensor"),
        ("aten.native_group_norm.default", "a weight is still a DTensor"),
        ("aten.copy_.default", "copied into a sharded parameter"),
        ("aten._foreach_lerp_.Scalar", "one call of the optimizer"),
        ("aten.stack.default", "a list has plain tensors and DTensors"),
        ("aten.where.self", "both plain tensors and DTensors"),
    ],
)
def test_the_operation_says_which_operand_is_plain(tmp_path: pathlib.Path, operation: str, clash: str) -> None:
    reading = _read(tmp_path, "fully_shard", f"RuntimeError: {operation}: {_MIXED}")
    assert clash in reading.clash
    assert "examine(model" in reading.decide or "full_tensor" in reading.decide


@pytest.mark.parametrize(
    ("saved", "again", "clash", "decide"),
    [
        (("8, 64", "bfloat16"), ("8, 64", "float32"), "as float32 that the forward saved as bfloat16", "cast"),
        (("33, 64", "bfloat16"), ("31, 64", "bfloat16"), "another shape ([31, 64]) than in the forward ([33, 64])",
         "an expert's tokens"),
    ],
    ids=["dtype", "rows"],
)  # fmt: skip
def test_a_recomputation_is_compared_in_dtype_and_in_shape(
    tmp_path: pathlib.Path, saved: tuple[str, str], again: tuple[str, str], clash: str, decide: str
) -> None:
    reading = _read(
        tmp_path,
        f"torch.utils.checkpoint.{_DIFFERENT} than during the forward pass.",
        "tensor at position 3:",
        f"saved metadata: {_describe(*saved)}",
        f"recomputed metadata: {_describe(*again)}",
    )
    assert clash in reading.clash
    assert decide in reading.decide


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ("The layers are compiled with torch.compile.", "compiled region"),
        ("The model is a mixture of experts.", "router"),
        ("We use context parallel size 2 in the trainer of the job.", "rank's part of the sequence"),
    ],
)
def test_what_the_log_names_next_to_a_traceback_is_a_possible_cause(
    tmp_path: pathlib.Path, told: str, cause: str
) -> None:
    raised = (
        f"torch.utils.checkpoint.{_DIFFERENT} than during the forward pass.",
        f"saved metadata: {_describe('4, 8', 'bfloat16')}",
        f"recomputed metadata: {_describe('8, 8', 'bfloat16')}",
    )
    assert cause in _read(tmp_path, told, *raised).decide.split("Do forward")[0]
    assert cause not in _read(tmp_path, *raised).decide.split("Do forward")[0]


@pytest.mark.parametrize(
    ("a", "b", "ratio"), [(3_000_000, 750_000, 4), (750_001, 3_000_000, 4), (151_936, 75_968, 2), (65_536, 131_072, 2)]
)
def test_a_whole_number_of_times_is_a_number_of_ranks(tmp_path: pathlib.Path, a: int, b: int, ratio: int) -> None:
    raised = (
        f"RuntimeError: The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension 0"
    )
    reading = _read(tmp_path, "FSDP", raised)
    assert f"one is {ratio} times the other" in reading.clash
    assert "By how many ranks was the state saved" in reading.decide


@pytest.mark.parametrize(("a", "b"), [(21, 9), (128_257, 128_256), (4_096, 2_048), (50_000, 33_000)])
def test_other_sizes_are_no_number_of_ranks(tmp_path: pathlib.Path, a: int, b: int) -> None:
    raised = (
        f"RuntimeError: The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension 0"
    )
    assert "times the other" not in _read(tmp_path, "FSDP", raised).clash


@pytest.mark.parametrize(
    ("raised", "clash", "decide"),
    [
        ("TypeError: fully_shard() got an unexpected keyword argument 'sharding_strategy'", "an argument of FSDP1",
         "reshard_after_forward"),
        ("TypeError: FullyShardedDataParallel.__init__() got an unexpected keyword argument 'offload_policy'",
         "an object or an argument of FSDP2", "fsdp_version"),
        ("AttributeError: 'FSDPBertModel' object has no attribute 'clip_grad_norm_'", "on a module of FSDP2",
         "torch.nn.utils.clip_grad_norm_"),
        ("ValueError: hybrid is not a valid ShardingStrategy, please select one of ['full_shard']",
         "no value that this version", "fsdp-doctor check CONFIG"),
        ("ValueError: load_best_model option is not compatible with FSDP state dict type 'LOCAL_STATE_DICT'",
         "something does not go together", "fsdp-doctor check CONFIG"),
        ("ImportError: Context parallelism requires torch >= 2.8.1", "needs torch >= 2.8.1", "fsdp-doctor env"),
        ("RuntimeError: setStorage: sizes [4, 4], strides [4, 1], storage offset 0, and itemsize 4 requiring a storage "
         "size of 64 are out of bounds for storage of size 0", "after its memory was freed", "reshard_after_forward"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", "impossible amount",
         "set_device(local_rank)"),
        ("NotImplementedError: Operator aten.einsum.default does not have a sharding strategy registered.",
         "torch.inference_mode()", "torch.no_grad()"),
        ("NotImplementedError: Operator xformers.attention.default does not have a sharding strategy registered.",
         "a kernel of another library", "to_local()"),
        ("AssertionError: found no DeviceMesh from dtensor args for c10d.allreduce_.default!",
         "a collective of torch.distributed", "full_tensor()"),
        ("RuntimeError: Tensors of the same index must be on the same device and the same dtype except `step`",
         "not of one device and dtype", "examine(model, optimizer)"),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
         "no tensor that is trained", "enable_input_require_grads"),
        ("ValueError: Must be one of ['fp32', 'bf16'], got torch.half", "torch.half is no value", "in which form"),
        ("AssertionError: No DTensor parameters in this model", "under FSDP1 or not wrapped", "examine(model)"),
        ("RuntimeError: Function MmBackward0 returned an invalid gradient at index 1 - got [64] but expected shape "
         "compatible with [8, 8]", "flat or divided in the other", "examine(model)"),
        ("AttributeError: 'DTensor' object has no attribute 'scales'", "the DTensor that wraps it", "to_local()"),
        ("RuntimeError: a weight update is already in progress", "two operations overlap", "wait for the end"),
        ("ValueError: Expected a cuda device, but got: cpu", "the device cpu", "set_device(local_rank)"),
    ],
)  # fmt: skip
def test_a_message_without_a_traceback_says_its_kind(
    tmp_path: pathlib.Path, raised: str, clash: str, decide: str
) -> None:
    reading = _read(tmp_path, "FSDP is on.", raised)
    assert clash in reading.clash
    assert decide in reading.decide


@pytest.mark.parametrize(("a", "b", "ratio"), [(512, 2_048, 4), (96, 48, 2)])
def test_the_optimizer_meets_a_shard_and_a_whole_tensor(tmp_path: pathlib.Path, a: int, b: int, ratio: int) -> None:
    frame = f'  File "{_SITE}/toy_optimizers/fused.py", line 9, in step'
    reading = _read(tmp_path, "fully_shard", BEGIN, frame, _describe_sizes(a, b))
    assert f"one is {ratio} times the other" in reading.clash
    assert "zeros_like(param)" in reading.decide


@pytest.mark.parametrize(
    ("message", "word", "command"),
    [
        ("the placements are odd", "placements", "examine(model)"),
        ("a param_group is odd", "param_group", "checkpoint verify"),
        ("a safetensors file is odd", "safetensors", "checkpoint verify DIR"),
        ("the world_size is odd", "world_size", "py-spy dump"),
    ],
)
def test_an_unknown_message_of_fsdp_still_names_a_command(
    tmp_path: pathlib.Path, message: str, word: str, command: str
) -> None:
    frame = f'  File "{_SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 9, in _toy'
    reading = _read(tmp_path, BEGIN, frame, f"KeyError: '{message}'")
    assert reading.clash == ""
    assert f'The message has the word "{word}"' in reading.decide
    assert command in reading.decide


def test_no_topic_is_found_in_a_failure_of_another_program(tmp_path: pathlib.Path) -> None:
    reading = explained(tmp_path, "ValueError: the world_size of this game is odd").reading
    assert reading is None or "fsdp" not in reading.decide


def test_a_name_is_missing_at_the_engine_only_below_its_frames(tmp_path: pathlib.Path) -> None:
    raised = "KeyError: 'tower.proj.weight'"
    engine = f'  File "{_SITE}/vllm/model_executor/models/toy.py", line 3, in load_weights'
    assert "trainer and engine" in _read(tmp_path, BEGIN, engine, raised).clash
    other = f'  File "{_SITE}/torch/distributed/fsdp/_optim_utils.py", line 3, in _flatten'
    assert "trainer and engine" not in _read(tmp_path, BEGIN, other, raised).clash


def test_another_exception_speaks_where_the_first_says_nothing(tmp_path: pathlib.Path) -> None:
    frame = '  File "/opt/megatron/core/optimizer.py", line 3, in step'
    lines = (BEGIN, frame, "AssertionError: got 17", "", BEGIN, frame.replace("3", "8"))
    explanation = explained(tmp_path, *lines, "AttributeError: 'Tensor' object has no attribute 'full_tensor'")
    assert explanation.foreign == ""
    assert explanation.reading is not None
    assert "another exception of the log says more" in explanation.reading.clash


def test_a_possible_entry_does_not_hide_what_the_log_shows(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, f"RuntimeError: aten.bmm.default: {_MIXED}")
    assert explanation.grade == "possible"
    first, *_ = render_text(explanation, 10_000).splitlines()
    assert "What the log shows: the activations are plain" in first
