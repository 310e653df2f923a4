"""A failure of no known kind is read by what the call that failed needs, and by what stands around it."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest
from support.written_logs import BEGIN, explained

from fsdp_doctor.explain.around import AroundReader
from fsdp_doctor.explain.contracts import Operation, read_contracts
from fsdp_doctor.explain.log_input import LogPiece
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


def _find_path(path: str) -> pathlib.Path | None:
    """Returns the file or directory of a place; None if its package is not installed here."""
    package, _, rest = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return pathlib.Path(next(iter(spec.submodule_search_locations))) / rest


@pytest.mark.parametrize("operation", read_contracts().operation, ids=lambda operation: operation.name)
def test_every_place_of_a_call_exists_in_the_installed_packages(operation: Operation) -> None:
    for place in operation.places:
        path, _, functions = place.partition(":")
        found = _find_path(path)
        if found is None:
            continue
        assert found.exists(), place
        names = [name.strip() for name in functions.split(",") if name.strip()]
        text = found.read_text(encoding="utf-8") if names else ""
        assert [name for name in names if not re.search(rf"(?:def|class) {name}\b", text)] == []


def test_every_need_has_patterns_that_compile_and_circumstances_that_exist() -> None:
    tables = read_contracts()
    for operation in tables.operation:
        for pattern in (operation.called, operation.code, operation.says):
            re.compile(pattern)
        assert operation.places or operation.older or operation.called or operation.code or operation.says
        for need in operation.need:
            assert set(need.given) <= set(tables.circumstance)
            assert need.signs or need.given
            assert need.decide
            for sign in need.signs:
                re.compile(sign)
            # A need that comes before every mechanism has a sign of its own.
            assert not need.first or need.signs


def test_a_cut_log_is_read_by_its_last_call_and_the_circumstance(tmp_path: pathlib.Path) -> None:
    gather = _frame(f"{_SITE}/torch/distributed/tensor/_api.py", "full_tensor", "redist_res = self.redistribute(")
    reading = _read(tmp_path, "cpu_offload: true, at the first refit", BEGIN, *gather)
    assert reading.clash.startswith("a gather of a DTensor needs a process group with a backend")
    assert "(the log names: an offload to the CPU)" in reading.clash
    assert "cpu:gloo,cuda:nccl" in reading.decide


def test_a_call_whose_log_shows_no_need_asks_for_each(tmp_path: pathlib.Path) -> None:
    gather = _frame(f"{_SITE}/torch/distributed/tensor/_api.py", "full_tensor", "redist_res = self.redistribute(")
    reading = _read(tmp_path, BEGIN, *gather)
    assert reading.clash == "it fails in a gather of a DTensor"
    assert "needs (1) a process group" in reading.decide
    assert "(2) all ranks of the tensor's mesh" in reading.decide


def test_a_word_after_a_name_is_no_value_of_a_setting() -> None:
    line = "I use the `HYBRID_SHARD` sharding strategy, --fsdp_mode full and cpu_offload: true"
    reader = AroundReader()
    reader.read(LogPiece(line, [line], [1], [line]))
    assert dict(reader.end().settings) == {"fsdp_mode": "full", "cpu_offload": "true"}


@pytest.mark.parametrize(
    ("place", "raised", "needs"),
    [
        (("torch/nn/utils/clip_grad.py", "get_total_norm"),
         "ValueError: All operands in aten.stack.default must have the same mesh, but got two", "norms of one mesh"),
        (("torch/optim/optimizer.py", "state_dict"), "KeyError: 139741263911344", "states that belong to the param"),
        (("vllm/lora/layers/base_linear.py", "set_lora"), "IndexError: too many indices for tensor of dimension 1",
         "adapter matrices of two dimensions"),
        (("torch/multiprocessing/reductions.py", "rebuild_storage_fd"), "RuntimeError: received 0 items of ancdata",
         "a file descriptor for each tensor"),
        (("torch/distributed/_composable/fsdp/_fsdp_param.py", "_init_sharded_param"),
         "RuntimeError: only Tensors of floating point dtype can require gradients", "parameters that can be divided"),
        (("torch/distributed/tensor/_api.py", "distribute_tensor"),
         "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:317, internal error", "a machine that it can read"),
    ],
)  # fmt: skip
def test_the_message_says_which_need_is_not_met(
    tmp_path: pathlib.Path, place: tuple[str, str], raised: str, needs: str
) -> None:
    frame = _frame(f"{_SITE}/{place[0]}", place[1], "call()")
    assert needs in _read(tmp_path, "FSDP2 on 8 ranks", BEGIN, *frame, raised).clash


def test_a_word_of_many_messages_alone_shows_no_need(tmp_path: pathlib.Path) -> None:
    frame = _frame(f"{_SITE}/torch/distributed/tensor/_api.py", "distribute_tensor", "call()")
    reading = _read(tmp_path, BEGIN, *frame, "RuntimeError: a device is broken")
    assert "needs the same whole shape" not in reading.clash


def test_a_call_without_sharding_in_the_log_is_not_read(tmp_path: pathlib.Path) -> None:
    frame = _frame(f"{_SITE}/torch/optim/optimizer.py", "state_dict", "packed_state = {")
    reading = explained(tmp_path, BEGIN, *frame, "KeyError: 139741263911344").reading
    assert reading is None or "needs" not in reading.clash


@pytest.mark.parametrize(
    ("told", "is_quoted"),
    [
        ("synchronous save of the same model is ok", True),
        ("AdamW works, swapping to Adagrad gives:", True),
        ("Rolling back to the release of last week helps", True),
        ("It does not work with one GPU.", False),
        ("Does it work without FSDP?", False),
        ("The model has 8 layers.", False),
    ],
)
def test_a_sentence_on_where_it_does_not_fail_is_quoted(tmp_path: pathlib.Path, told: str, is_quoted: bool) -> None:
    frame = _frame(f"{_SITE}/torch/distributed/checkpoint/staging.py", "stage", "call()")
    decide = _read(tmp_path, told, BEGIN, *frame, "RuntimeError: something of FSDP").decide
    assert ("The log compares" in decide) == is_quoted


def test_the_setting_with_the_words_of_the_failed_code_is_named(tmp_path: pathlib.Path) -> None:
    frame = _frame("/verl/verl/utils/torch_functional.py", "_fused_linear_for_ppo_fwd", "logits = h @ w.t()")
    raised = "RuntimeError: got mixed torch.Tensor and DTensor"
    decide = _read(tmp_path, "use_fused_kernels=True, use_remove_padding=True, fsdp2", BEGIN, *frame, raised).decide
    assert "`use_fused_kernels=True`" in decide
    assert "use_remove_padding" not in decide


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
    assert 'The log compares ("With a restart it is fine.")' in text


def test_a_hang_names_the_part_that_some_ranks_leave_out(tmp_path: pathlib.Path) -> None:
    timeout = (
        "[rank1]:[E812 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL("
        "SeqNum=41, OpType=_ALLGATHER_BASE, NumelIn=16, NumelOut=128, Timeout(ms)=600000) ran for 600029 milliseconds "
        "before timing out."
    )
    reading = _read(tmp_path, "Some of the batches have no images.", timeout)
    assert "leaves the tower out" in reading.decide


def test_a_lookup_says_more_than_a_circumstance(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/accelerate/accelerator.py", "prepare", "self._prepare_one(model)")
    inner = _frame(f"{_SITE}/torch/nn/modules/module.py", "__getattr__", "raise AttributeError(message)")
    raised = "AttributeError: 'LlamaForCausalLM' object has no attribute 'hf_quantizer'"
    reading = _read(tmp_path, "qlora under fsdp", BEGIN, *place, *inner, raised)
    assert "asks an object of the class LlamaForCausalLM for hf_quantizer" in reading.clash


def test_what_the_message_advises_is_said_but_not_its_boilerplate(tmp_path: pathlib.Path) -> None:
    raised = "ValueError: fully_shard doesn't support scalar parameters. Change scale_input to a 1D tensor."
    assert 'The message advises: "Change scale_input to a 1D tensor."' in _read(tmp_path, raised).decide
    reported = "RuntimeError: fully_shard is broken. Please report this issue to the developers of FSDP."
    assert "The message advises" not in _read(tmp_path, reported).decide


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


def test_the_logs_own_directory_and_configuration_stand_in_the_commands(tmp_path: pathlib.Path) -> None:
    told = [
        "accelerate launch --config_file conf/fsdp2.yaml train.py --resume out/run/checkpoint-200",
        "After the resume under FSDP the loss jumps.",
    ]
    assert "fsdp-doctor checkpoint verify out/run/checkpoint-200" in _read(tmp_path, *told).decide
    both = _read(tmp_path, *told, "The other one is out/run/checkpoint-300.")
    assert "fsdp-doctor checkpoint verify DIR" in both.decide


def test_a_name_in_the_message_stands_in_the_reading(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/vllm/model_executor/models/utils.py", "_load_module", "raise ValueError(msg)")
    raised = "ValueError: There is no module or parameter named 'base_model' in Qwen2ForCausalLM"
    assert "the message names base_model" in _read(tmp_path, "fsdp", BEGIN, *place, raised).clash
    other = "KeyError: a tensor on 'cuda' was not found"
    assert "the message names" not in _read(tmp_path, "fsdp", BEGIN, *place, other).clash


def test_a_name_with_a_wrappers_prefix_is_read_as_such(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/peft/utils/other.py", "adapter_state_dict", "state_dict[key]")
    raised = "KeyError: '_fsdp_wrapped_module.base_model.model.embed.token_adapter.delta.default'"
    assert "has the prefix of a wrapper (_fsdp_wrapped_module)" in _read(tmp_path, "FSDP", BEGIN, *place, raised).clash


def test_a_line_that_python_refuses_is_the_packages_own(tmp_path: pathlib.Path) -> None:
    code = "orig = 'cpu' if 'cpu' in next(model.parameters()).device else 'cuda'"
    place = _frame("/opt/verl/verl/workers/sharding_manager/fsdp_vllm.py", "collect", code)
    reading = _read(tmp_path, BEGIN, *place, "TypeError: argument of type 'torch.device' is not iterable")
    assert "of verl fails by itself: argument of type 'torch.device' is not iterable" in reading.clash


def test_a_circumstance_that_the_call_implies_shows_no_need(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/torch/_inductor/utils.py", "run", "return model(new_inputs)")
    reading = _read(tmp_path, "torch.compile under FSDP", BEGIN, *place, "AssertionError: expected size 4096==1024")
    assert "needs one dtype" not in reading.clash


def test_tensor_parallelism_alone_is_no_certain_forward_outside_of_fsdp(tmp_path: pathlib.Path) -> None:
    place = _frame(f"{_SITE}/torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight, self.bias)")
    raised = (
        "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    )
    assert explained(tmp_path, 'a model with tp_plan="auto"', BEGIN, *place, raised).grade != "known"
    assert explained(tmp_path, "a model under fully_shard", BEGIN, *place, raised).grade == "known"
