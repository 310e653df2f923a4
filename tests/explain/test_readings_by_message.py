"""A failure of no known kind is read by the form of its message."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, explained

from fsdp_doctor.explain.mechanisms import Reading
from fsdp_doctor.explain.text import render_text

_SITE = "/env/lib/python3.12/site-packages"

_TYPES = "RuntimeError: Input type ({}) and weight type ({}) should be the same"


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    reading = explained(tmp_path, *lines).reading
    assert reading is not None
    return reading


def _frame(file: str, function: str, code: str) -> list[str]:
    return [f'  File "{file}", line 7, in {function}', f"    {code}"]


@pytest.mark.parametrize(
    ("place", "raised", "words"),
    [
        ("torch/nn/utils/clip_grad.py", "ValueError: All operands in aten.stack.default must have the same mesh, but",
         "norm for each mesh apart"),
        ("skyrl/loader.py", "RuntimeError: Found the DeviceMesh have 2 dimensions; `mesh_dim` needs to be specified",
         "asks a device mesh of 2 dimensions for one group"),
        ("axolotl/wrap.py", "AssertionError: FSDP expects uniform original parameter dtype but got {torch.float32}",
         "parameters of several dtypes"),
        ("oumi/wrap.py", "RuntimeError: FSDP parameters should be materialized on CPU when enabling CPU offloading",
         "not on the CPU at the first forward"),
        ("torch/distributed/distributed_c10d.py", "ValueError: Default process group has not been initialized, please "
         "make sure to call init_process_group.", "none was made before it"),
        ("vllm/model_executor/models/utils.py", "ValueError: There is no module or parameter named 'base_model' in "
         "Qwen2ForCausalLM", "begins with 'base_model'"),
        ("torch/serialization.py", "FileNotFoundError: [Errno 2] No such file or directory: '/out/fsdp.bin'",
         "'/out/fsdp.bin' does not exist where this rank looks"),
        ("torch/multiprocessing/reductions.py", "RuntimeError: received 0 items of ancdata", "no file descriptor left"),
        ("torch/optim/optimizer.py", "KeyError: 139741263911344", "in none of its groups"),
    ],
)  # fmt: skip
def test_the_message_says_what_the_call_needs(tmp_path: pathlib.Path, place: str, raised: str, words: str) -> None:
    frame = _frame(f"{_SITE}/{place}", "state_dict", "call()")
    reading = _read(tmp_path, "FSDP2 on 8 ranks", BEGIN, *frame, raised)
    assert words in f"{reading.clash} {reading.decide}"


def test_degrees_that_do_not_multiply_to_the_ranks_are_read(tmp_path: pathlib.Path) -> None:
    reading = _read(tmp_path, "RuntimeError: tp_size (2) * fsdp_size (2) is not equal to world_size (8)")
    assert "do not multiply to world_size (8)" in reading.clash


def test_a_kernel_that_a_device_lacks_is_no_matter_of_placement(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", "call()")
    raised = "NotImplementedError: The operator 'fsdp::chunk_cat' is not currently implemented for the NPU device."
    assert "has no kernel of fsdp::chunk_cat for the device NPU" in _read(tmp_path, BEGIN, *place, raised).clash


def test_two_figures_whose_quotient_is_a_number_of_ranks_are_read(tmp_path: pathlib.Path) -> None:
    told = "With TP=4 on 32 ranks the loss is 1.5 under FSDP, and 12.0 with TP=1 for the same data."
    reading = _read(tmp_path, told)
    assert "one figure is 8 times the other (12 and 1.5)" in reading.clash
    assert "reduced over the mesh of one kind of parallelism" in reading.decide


def test_a_text_without_a_known_symptom_is_answered_with_a_question(tmp_path: pathlib.Path) -> None:
    told = "Under FSDP the rewards collapse after each weight update of the engine. With a restart it is fine."
    text = render_text(explained(tmp_path, told), 400)
    assert "What its text tells is no known symptom: after a sync of weights to an engine" in text


def test_a_hang_names_the_part_that_some_ranks_leave_out(tmp_path: pathlib.Path) -> None:
    timeout = (
        "[rank1]:[E812 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL("
        "SeqNum=41, OpType=_ALLGATHER_BASE, NumelIn=16, NumelOut=128, Timeout(ms)=600000) ran for 600029 milliseconds "
        "before timing out."
    )
    reading = _read(tmp_path, "Some of the batches have no images.", timeout)
    assert "leaves the tower out" in reading.decide


def test_what_the_message_advises_is_said_but_not_its_boilerplate(tmp_path: pathlib.Path) -> None:
    raised = "ValueError: fully_shard doesn't support scalar parameters. Change scale_input to a 1D tensor."
    assert 'The message advises: "Change scale_input to a 1D tensor."' in _read(tmp_path, raised).decide
    reported = "RuntimeError: fully_shard is broken. Please report this issue to the developers of FSDP."
    assert explained(tmp_path, reported).reading is None


@pytest.mark.parametrize(
    ("told", "raised", "words"),
    [
        ("On a single GPU it dies, on 2 GPUs it trains.", _TYPES.format("c10::BFloat16", "float"),
         "not applied on one rank"),
        ("torch 2.13", _TYPES.format("torch.cuda.FloatTensor", "torch.FloatTensor"), "was offloaded or never moved"),
    ],
    ids=["one rank", "device"],
)  # fmt: skip
def test_types_of_input_and_weight_are_told_apart(tmp_path: pathlib.Path, told: str, raised: str, words: str) -> None:
    assert words in _read(tmp_path, told, raised).decide


def test_the_optimizers_step_is_read_with_its_three_dtypes(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/torch/optim/adamw.py", "_single_tensor_adamw", "exp_avg.lerp_(grad, 1 - beta1)")
    raised = "RuntimeError: expected dtype float for `end` but got dtype c10::BFloat16"
    reading = _read(tmp_path, "FSDP", BEGIN, *place, raised)
    assert "a parameter, its gradient and its state are not of one dtype: float and c10::BFloat16" in reading.clash


def test_a_container_for_one_object_is_read_without_the_jobs_frame(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/accelerate/accelerator.py", "no_sync", "model.set_requires_gradient_sync(False)")
    raised = "AttributeError: 'list' object has no attribute 'set_requires_gradient_sync'"
    reading = _read(tmp_path, "FSDP2", BEGIN, *place, raised)
    assert "a list stands where `no_sync` takes one object" in reading.clash


def test_a_name_with_a_wrappers_prefix_is_read_as_such(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/peft/utils/other.py", "adapter_state_dict", "state_dict[key]")
    raised = "KeyError: '_fsdp_wrapped_module.base_model.model.embed.token_adapter.delta.default'"
    assert "has the prefix of a wrapper (_fsdp_wrapped_module)" in _read(tmp_path, "FSDP", BEGIN, *place, raised).clash


def test_a_line_that_python_refuses_is_the_packages_own(tmp_path: pathlib.Path) -> None:
    code = "orig = 'cpu' if 'cpu' in next(model.parameters()).device else 'cuda'"
    place = _frame("/opt/verl/verl/workers/sharding_manager/fsdp_vllm.py", "collect", code)
    reading = _read(tmp_path, BEGIN, *place, "TypeError: argument of type 'torch.device' is not iterable")
    assert "of verl fails by itself: argument of type 'torch.device' is not iterable" in reading.clash


def test_tensor_parallelism_alone_is_no_certain_forward_outside_of_fsdp(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight, self.bias)")
    raised = (
        "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    )
    assert explained(tmp_path, 'a model with tp_plan="auto"', BEGIN, *place, raised).grade != "known"
    assert explained(tmp_path, "a model under fully_shard", BEGIN, *place, raised).grade == "known"
