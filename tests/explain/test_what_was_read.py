"""An answer says what was read in a log, and nothing that a word only suggests."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, cause_of, entry_of, explained

from fsdp_doctor.explain.text import render_text

_SITE = "/env/lib/python3.12/site-packages"
_FSDP2 = f"{_SITE}/torch/distributed/fsdp/_fully_shard"
_BACKWARD = [
    *("    loss.backward()", f'  File "{_SITE}/torch/_tensor.py", line 625, in backward'),
    *("    torch.autograd.backward(", f'  File "{_SITE}/torch/autograd/__init__.py", line 354, in backward'),
]
_TOGETHER = "ValueError: a model and optimizer must be passed together to `Accelerator.prepare()` under FSDP2"


def _frame(file: str, function: str, code: str) -> list[str]:
    return [f'  File "{file}", line 7, in {function}', f"    {code}"]


def _answer(tmp_path: pathlib.Path, *lines: str) -> str:
    return render_text(explained(tmp_path, *lines), 10_000)


@pytest.mark.parametrize("raised", ["KeyError: 'encoder.head.weight'", "ValueError: the shard is empty"])
@pytest.mark.parametrize("width", [150, 170])
def test_an_exception_is_not_joined_to_a_wide_line(tmp_path: pathlib.Path, raised: str, width: int) -> None:
    told = ("The parameters of the encoder were read from the checkpoint of oumi " * 4)[: width - 1] + "t"
    assert cause_of(explained(tmp_path, told, raised)).text == raised


@pytest.mark.parametrize(
    "frames",
    [
        ["torchtitan/models/llama/model.py:88 forward", "torch/distributed/fsdp/_fsdp_param_group.py:40 unshard"],
        ["olmo_core/nn/block.py:12 in forward   -> self.w1(x)", "torch/optim/optimizer.py:9 in step"],
    ],
)  # fmt: skip
def test_shortened_frames_below_a_message_are_no_part_of_it(tmp_path: pathlib.Path, frames: list[str]) -> None:
    message = "RuntimeError: the tensor has no storage and its state is odd. ".ljust(119, "x") + "."
    cause = cause_of(explained(tmp_path, message, *frames))
    assert cause.text == message
    assert len(cause.frames) == 2


@pytest.mark.parametrize("file", ["_fsdp_param_group.py", "optim/checkpoint_config.py"])
def test_a_word_of_a_files_name_is_no_word_of_the_message(tmp_path: pathlib.Path, file: str) -> None:
    answer = _answer(tmp_path, BEGIN, *_frame(f"{_FSDP2}/_fsdp_state.py", "_toy", "toy()"), f"KeyError: 'odd: {file}'")
    assert "The message has the word" not in answer
    assert "is about" not in answer


@pytest.mark.parametrize(
    "message",
    ["Cannot use the cache of examples because its index is not set and no path was given",
     "cannot set the reader because it was closed and nothing was read"],
)  # fmt: skip
def test_a_reason_in_a_message_is_no_second_setting(tmp_path: pathlib.Path, message: str) -> None:
    frame = _frame(f"{_SITE}/torchtune/trainer.py", "setup", "raise ValueError(message)")
    assert "does not go together" not in _answer(tmp_path, "FSDP", BEGIN, *frame, f"ValueError: {message}")


@pytest.mark.parametrize("wrapper", ["fire/core.py", "click/core.py", "datasets/arrow_dataset.py", "hydra/main.py"])
def test_who_only_calls_the_job_did_not_raise(tmp_path: pathlib.Path, wrapper: str) -> None:
    outer = _frame(f"{_SITE}/{wrapper}", "main", "fn(*args)")
    for file in ("/job/train.py", f"{_SITE}/{wrapper}"):
        frames = [*outer, *_frame(file, "train", "toy(model)")]
        reading = explained(tmp_path, "FSDP", BEGIN, *frames, "RuntimeError: the shard is odd").reading
        assert reading is None or (reading.who == "" and wrapper not in reading.called)


@pytest.mark.parametrize(
    ("error", "about"),
    [
        ("[rank2]: Error while creating shared memory segment /dev/shm/nccl-x (size 9)", "shared memory of the"),
        ("(Worker pid=8) Error in load: [Errno 28] No space left on device", "a disk that is full"),
        ("Failed to rebuild the weights of the engine: shard 3 is missing", ""),
    ],
)  # fmt: skip
def test_the_error_line_above_a_cut_traceback_is_quoted(tmp_path: pathlib.Path, error: str, about: str) -> None:
    told = ["Error: an earlier line", error, "[rank7]: Traceback (most recent call last):"]
    frames = [f"[rank7]: {line}" for line in ['  File "/job/train.py", line 145, in main', *_BACKWARD]]
    answer = _answer(tmp_path, *told, *frames)
    assert "An error line above it" in answer
    assert error.rpartition("]: ")[2].rpartition("pid=8) ")[2] in answer
    assert "does not say which" not in answer
    assert ("which is no failure of FSDP's" in answer) == bool(about)
    assert about in answer


@pytest.mark.parametrize("raised", ["KeyError: 'blocks.3.gate.weight'", "RuntimeError: the toy of FSDP is odd"])
def test_the_error_line_above_an_open_failure_is_quoted(tmp_path: pathlib.Path, raised: str) -> None:
    lines = [BEGIN, *_frame("/job/train.py", "main", "toy(model)"), raised]
    assert "An error line above it" in _answer(tmp_path, "FSDP", "ERROR: rank 3 has no shard of this layer", *lines)
    assert "An error line" not in _answer(tmp_path, "FSDP", *lines, "ERROR: the job ended")


def test_a_cut_traceback_without_an_error_line_quotes_none(tmp_path: pathlib.Path) -> None:
    answer = _answer(tmp_path, "INFO: error_rate: 0.1", BEGIN, '  File "/job/train.py", line 145, in main', *_BACKWARD)
    assert "The log ends within a traceback" in answer
    assert "An error line" not in answer


@pytest.mark.parametrize(
    ("line", "is_quoted"),
    [
        ("ERROR: the engine of skyrl refused the weights", True),
        ("Unable to open the shard of rank 3", True),
        ("ERROR [train_loop]: Exception during training:", False),
        ("step 4 validation error: 0.12", False),
        ("eval_error=0.3, error in percent", False),
        ("The author could not see a difference.", False),
    ],
)
def test_an_error_line_begins_with_the_error(tmp_path: pathlib.Path, line: str, is_quoted: bool) -> None:
    assert ("An error line" in _answer(tmp_path, "epoch 1", line, "epoch 2")) == is_quoted


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("self.optim = self.accelerator.prepare(self.optim)", "the optimizer is prepared without its model"),
        ("optimizer = accelerator.prepare(optimizer)", "the optimizer is prepared without its model"),
        ("model = accelerator.prepare(model)", "prepares only one of model and optimizer"),
        ("objects = wrapper.make(args)", "prepares only one of model and optimizer"),
    ],
)
def test_a_preparation_names_the_one_that_is_alone(tmp_path: pathlib.Path, code: str, words: str) -> None:
    frames = [*_frame("/opt/oumi/src/oumi/train.py", "setup", code),
              *_frame(f"{_SITE}/accelerate/accelerator.py", "prepare", "raise ValueError(")]  # fmt: skip
    assert words in _answer(tmp_path, BEGIN, *frames, _TOGETHER)


@pytest.mark.parametrize(
    ("raised", "about"),
    [
        ("RuntimeError: unable to write: the shared memory segment /dev/shm/torch_9 is full", "shared memory"),
        ("RuntimeError: DataLoader worker (pid 3) is killed: insufficient shared memory (shm)", "shared memory"),
        ("ValueError: tokenizer.pad_token is None for this model", "a tokenizer or a template"),
        ("ValueError: no chat_template is set in the tokenizer's files", "a tokenizer or a template"),
    ],
)
def test_a_failure_of_the_surroundings_is_told_as_such(tmp_path: pathlib.Path, raised: str, about: str) -> None:
    frame = _frame(f"{_SITE}/torchtune/data/messages.py", "tokenize", "toy()")
    answer = _answer(tmp_path, BEGIN, *frame, raised)
    assert answer.startswith(f"No failure of FSDP's: the log is about {about}")


@pytest.mark.parametrize(
    "raised",
    ["FileNotFoundError: no config.json in /dev/shm/models/toy", "KeyError: 'pad_token_id'"],
)
def test_a_word_of_the_surroundings_alone_is_no_cause(tmp_path: pathlib.Path, raised: str) -> None:
    answer = _answer(tmp_path, BEGIN, *_frame("/job/train.py", "main", "toy()"), raised)
    assert "shared memory" not in answer
    assert "tokenizer" not in answer


@pytest.mark.parametrize(
    ("place", "warning"),
    [
        ("fsdp/_fully_shard/_fsdp_state.py", "UserWarning: the output of FSDP2-wrapped module FSDPToy is a view."),
        ("tensor/_random.py", "UserWarning: DTensor's random operators may give other numbers."),
    ],
)
def test_a_warning_of_torchs_sharding_is_quoted(tmp_path: pathlib.Path, place: str, warning: str) -> None:
    answer = _answer(tmp_path, "epoch 1 of 3", f"{_SITE}/torch/distributed/{place}:331: {warning}", "epoch 2 of 3")
    assert "found no failure" not in answer
    assert f'"{warning}"' in answer


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (["step | baseline | resumed", "---|---|---", "9 | 1.50 | 1.50", "10 | 1.48 | 1.48", "11 | 1.47 | 300.5"],
         "after 2 equal steps"),
        (["it reference reloaded delta", "5 2.0 2.0 0.0", "6 2.1 91.0 88.9"], "after an equal step"),
    ],
)  # fmt: skip
def test_a_resumed_run_that_explodes_in_a_table_is_read(tmp_path: pathlib.Path, table: list[str], words: str) -> None:
    answer = _answer(tmp_path, *table)
    assert words in answer
    assert "the optimizer's state" in answer


def test_a_table_of_equal_runs_is_no_symptom(tmp_path: pathlib.Path) -> None:
    assert "found no failure" in _answer(tmp_path, "step original resumed", "5 2.0 2.0", "6 2.1 2.1001", "7 1.9 2.3")


@pytest.mark.parametrize("after", [1, 2])
def test_a_jump_some_steps_after_a_resume_is_read(tmp_path: pathlib.Path, after: int) -> None:
    losses = [f"step {at} loss: {900.5 if at == 20 + after else 2.1}" for at in range(20, 24)]
    answer = _answer(tmp_path, "step 19 loss: 2.1", "resumed from /out/step", *losses)
    assert f"loss is 900.5 {after + 1} steps after a load" in answer


@pytest.mark.parametrize("operation", ["aten.split.Tensor", "_c10d_functional.wait_tensor.default"])
def test_an_operation_that_only_the_recomputation_has_is_read(tmp_path: pathlib.Path, operation: str) -> None:
    raised = f"RuntimeError: {operation} encountered during backward but not found in storage."
    answer = _answer(
        tmp_path, BEGIN, *_frame(f"{_SITE}/torch/utils/checkpoint.py", "pop", "raise RuntimeError("), raised
    )
    assert f"runs an operation ({operation})" in answer
    assert "reshard_after_forward=False" in answer


@pytest.mark.parametrize(
    ("frames", "when"),
    [
        ([("torch/utils/checkpoint.py", "recompute_fn"), ("torchtitan/model.py", "forward")],
         "the backward, which recomputes a forward"),
        ([("torch/utils/checkpoint.py", "checkpoint"), ("torchtitan/model.py", "forward")], "the forward"),
        ([("nemo/checkpoints.py", "convert_in_state_dict")], "a save or a load"),
        ([("accelerate/accelerator.py", "prepare")], "the preparation of model and optimizer"),
    ],
)  # fmt: skip
def test_the_phase_is_that_of_the_call(tmp_path: pathlib.Path, frames: list[tuple[str, str]], when: str) -> None:
    lines = [line for file, function in frames for line in _frame(f"{_SITE}/{file}", function, "toy()")]
    assert f"when: {when}\n" in _answer(tmp_path, "FSDP2", BEGIN, *lines, "RuntimeError: the toy of FSDP is odd")


@pytest.mark.parametrize("address", ["10.0.0.7<40815>", "fe80::1%eth0<3>"])
def test_a_connection_that_nccl_cannot_make_names_the_interface(tmp_path: pathlib.Path, address: str) -> None:
    raised = f"ncclSystemError: Last error: socketStartConnect: Connect to {address} failed : No route to host"
    answer = _answer(tmp_path, raised)
    assert f"Connect to {address} failed" in answer
    assert "NCCL_SOCKET_IFNAME" in answer


@pytest.mark.parametrize(
    ("file", "function"), [("nn/utils/clip_grad.py", "_clip_grads_with_norm_"), ("optim/adam.py", "step")]
)
def test_a_remedy_for_mixed_tensors_names_the_call(tmp_path: pathlib.Path, file: str, function: str) -> None:
    raised = "RuntimeError: aten._foreach_mul_.Tensor: got mixed torch.Tensor and DTensor, need to convert all "
    raised += "torch.Tensor to DTensor"
    lines = ("fully_shard", BEGIN, *_frame(f"{_SITE}/torch/{file}", function, "toy()"), raised)
    assert entry_of(explained(tmp_path, *lines)) == "dtensor-mixed-in-optimizer"
    remedy = _answer(tmp_path, *lines).split("Remedy: ")[1].split("\n")[0]
    assert "in a clipping, take the norms" in remedy
    assert "in the optimizer's step, give them their own param group" in remedy


@pytest.mark.parametrize(
    "told", ["The config says to tie encoder.embed.weight to head.weight.", "Its weights are tied on purpose."]
)
def test_a_lacking_name_asks_for_the_tie_that_the_log_names(tmp_path: pathlib.Path, told: str) -> None:
    assert "`tie_word_embeddings` says which" in _answer(
        tmp_path, f"Under FSDP it fails. {told}", "KeyError: 'head.weight'"
    )


def _refuse(loaded: str, own: str) -> str:
    return f"AssertionError: Attempted to load weight (torch.Size([{loaded}])) into parameter (torch.Size([{own}]))"


def test_refused_sizes_are_read_in_a_log_without_an_exception(tmp_path: pathlib.Path) -> None:
    line = "[worker 1] ERROR update failed: Attempted to load weight (torch.Size([90, 8])) into parameter ([88, 8])"
    answer = " ".join(_answer(tmp_path, "FSDP2 is on.", line).split())
    assert "the loaded weight has [90, 8], and the parameter has [88, 8]" in answer


@pytest.mark.parametrize(
    ("told", "loaded", "own", "words"),
    [
        ("A script of EasyR1 joins the files of 12 ranks.", "516", "512", "12 shards of 43 rows are 516 rows"),
        ("The export of prime-rl has joined the weights on the host.", "100, 6", "94, 6", "for 10, 20, 25, ... shards"),
        ("The export of prime-rl has joined the weights on the host.", "32, 6", "128, 6", "4 times 32 are 128"),
        ("The trainer of AReaL writes what it has on the first rank.", "128, 6", "32, 6", "4 ranks of tensor"),
        ("The trainer of AReaL writes what it has on the first rank.", "0", "32, 6", "the loaded weight is empty"),
        ("The trainer of AReaL writes what it has on the first rank.", "192", "32, 6", "(it is flat)"),
        ("The trainer of AReaL writes what it has on the first rank.", "96, 1", "32, 6", "two 4-bit values in a byte"),
        ("The trainer of AReaL writes what it has on the first rank.", "7, 3", "32, 6", "Which weight is it"),
        ("The trainer of AReaL writes what it has on the first rank.", "", "1", "Which weight is it"),
    ],
)  # fmt: skip
def test_refused_sizes_of_a_weight_are_compared(
    tmp_path: pathlib.Path, told: str, loaded: str, own: str, words: str
) -> None:
    answer = " ".join(_answer(tmp_path, told, _refuse(loaded, own)).split())
    assert f"the loaded weight has [{loaded}], and the parameter has [{own}]" in answer
    assert words in answer
    assert "first load" not in answer


@pytest.mark.parametrize(("package", "function"), [("areal", "update_weights_from_tensor"), ("roll", "refit_engine")])
def test_another_layout_needs_a_load_into_a_running_engine(tmp_path: pathlib.Path, package: str, function: str) -> None:
    for caller, is_later in ((function, True), ("build_engine", False)):
        frames = _frame(f"{_SITE}/{package}/engine.py", caller, "model.load_weights(weights)")
        answer = _answer(tmp_path, BEGIN, *frames, _refuse("64, 128", "8, 4, 16"))
        assert ("another layout than at its first load" in " ".join(answer.split())) == is_later


@pytest.mark.parametrize(
    ("header", "code", "raised"),
    [
        ("(driver pid=8) ray.exceptions.RayTaskError(LookupError): ray::Toy.sample() (pid=9)",
         ['raise LookupError(f"no prompt of {name}")'], "LookupError: no prompt of {name}"),
        ("ray.exceptions.RayTaskError(ShardError): ray::Actor.save() (pid=9, ip=10.0.0.9)",
         ["raise errors.ShardError(", '    "the shard is "', "    'odd')"], "ShardError: the shard is odd"),
        ("ray.exceptions.RayTaskError(ShardError): ray::Actor.save() (pid=9, ip=10.0.0.9)",
         ["raise ShardError(message)"], "ShardError"),
    ],
)  # fmt: skip
def test_a_header_and_a_raise_give_the_exception(
    tmp_path: pathlib.Path, header: str, code: list[str], raised: str
) -> None:
    prefix = header[: header.index("ray.")]
    frames = ['  File "/opt/openrlhf/toy.py", line 7, in sample', *(f"    {line}" for line in code)]
    explanation = explained(tmp_path, header, *(prefix + line for line in frames))
    assert explanation.showing == "failure"
    assert cause_of(explanation).text == raised


@pytest.mark.parametrize("code", ["raise ValueError('odd')", "self.save(model)"])
def test_a_cut_traceback_of_another_exception_stays_cut(tmp_path: pathlib.Path, code: str) -> None:
    header = "ray.exceptions.RayTaskError(ShardError): ray::Actor.save() (pid=9)"
    assert explained(tmp_path, header, *_frame("/opt/openrlhf/toy.py", "save", code)).showing == "cut"


@pytest.mark.parametrize(
    ("raised", "name", "operator"),
    [
        ("NotImplementedError: Int3Tensor dispatch: attempting to run aten.split.Tensor, unimplemented",
         "Int3Tensor", "aten.split"),
        ("NotImplementedError: Toy4Tensor dispatch: attempting to run unimplemented operator/function: "
         "func=<OpOverload(op='aten.new_zeros', overload='default')>, types=(<class 'toy.Toy4Tensor'>,)",
         "Toy4Tensor", "aten.new_zeros"),
        ("TypeError: no implementation found for 'torch.ops.aten.as_strided.default' on types that implement "
         "__torch_dispatch__: [<class 'quant.core.PackedTensor'>]", "PackedTensor", "aten.as_strided"),
        ("TypeError: Multiple dispatch failed for 'torch.ops.aten.slice.Tensor'; all __torch_dispatch__ handlers "
         "returned NotImplemented: - tensor subclass <class 'quant.core.PackedTensor'>", "PackedTensor", "aten.slice"),
        ("NotImplementedError: RowTensor: does not implement aten.view.default", "RowTensor", "aten.view"),
        ("NotImplementedError: aten.cat.default is not implemented for RowTensor", "RowTensor", "aten.cat"),
    ],
)  # fmt: skip
def test_an_operator_that_a_tensor_subclass_lacks_is_named(
    tmp_path: pathlib.Path, raised: str, name: str, operator: str
) -> None:
    wrap = _frame("/job/nanotron/wrap.py", "wrap", "fully_shard(block)")
    chunk = _frame(f"{_FSDP2}/_fsdp_common.py", "_chunk_with_empty", "chunks = list(torch.chunk(tensor, num_chunks))")
    for lines in ([raised], [BEGIN, *wrap, *chunk, raised]):
        answer = " ".join(_answer(tmp_path, *lines).split())
        assert f"a tensor subclass ({name}) lacks an operator that sharding needs ({operator}" in answer
        assert "shard first and quantize" in answer
    load = _frame(f"{_SITE}/lmdeploy/weights.py", "load_weights", "part = param.narrow(0, 0, 8)")
    assert "sharding needs" not in _answer(tmp_path, BEGIN, *load, raised)


@pytest.mark.parametrize(("part", "is_sharding"), [("torch/distributed/tensor/_dispatch.py", True), ("toy.py", False)])
def test_any_other_operator_counts_in_a_step_of_sharding(tmp_path: pathlib.Path, part: str, is_sharding: bool) -> None:
    raised = "NotImplementedError: Int3Tensor dispatch: attempting to run aten.erf.default, unimplemented"
    answer = " ".join(_answer(tmp_path, BEGIN, *_frame(f"{_SITE}/{part}", "toy", "toy()"), raised).split())
    assert ("that this step of sharding calls (aten.erf)" in answer) == is_sharding
    assert "that sharding needs" not in answer
