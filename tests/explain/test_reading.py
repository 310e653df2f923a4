"""Every failure that is not known gets a reading: what does not fit, who and when, from which lines, what decides."""

from __future__ import annotations

import pathlib

import pytest
from support.written_logs import BEGIN, UNSHARD, explained, traceback

from fsdp_doctor.explain.mechanisms import Reading

_SITE = "/env/lib/python3.12/site-packages"


def _read(tmp_path: pathlib.Path, *lines: str) -> Reading:
    reading = explained(tmp_path, *lines).reading
    assert reading is not None
    return reading


@pytest.mark.parametrize(
    ("key", "word", "other"),
    [
        ("model.layers.0.attn._extra_state", "in addition to its weights", "optimizer"),
        ("optim.param_groups.decoder.lr", "setting", "weight"),
        ("optimizer.state.exp_avg.decoder", "optimizer's state", "tied"),
        ("train_loader.dp_rank_0.cursor", "data loader", "tied"),
        ("lm_head.weight", "tied", "optimizer"),
        ("critic.v_head.scale", "renamed", "optimizer"),
    ],
)
def test_a_lacking_key_is_read_by_what_it_names(tmp_path: pathlib.Path, key: str, word: str, other: str) -> None:
    reading = _read(tmp_path, f"RuntimeError: Missing key in checkpoint state_dict: {key}.")
    assert word in reading.clash
    assert key in reading.clash
    assert other not in reading.clash
    assert "checkpoint verify" in reading.decide or "same version" in reading.decide
    assert "allow_partial_load" not in reading.decide


@pytest.mark.parametrize(
    ("frame", "raised", "who", "when", "clash"),
    [
        ("torch/optim/adam.py", "NotImplementedError: DTensor does not support cross-mesh operation yet!",
         "torch's optimizer", "the optimizer's step", "meshes"),
        ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "RuntimeError: The size of tensor a (9) must match the "
         "size of tensor b (21) at non-singleton dimension 1", "torch's FSDP2", "", "12 apart"),
        ("torch/distributed/checkpoint/planner_helpers.py", "ValueError: no such thing",
         "torch's distributed checkpoint", "", ""),
    ],
    ids=["mesh", "shape", "place alone"],
)  # fmt: skip
def test_who_and_when_are_read_from_the_frames(
    tmp_path: pathlib.Path, frame: str, raised: str, who: str, when: str, clash: str
) -> None:
    reading = _read(tmp_path, BEGIN, f'  File "{_SITE}/{frame}", line 7, in run', raised)
    assert (reading.who, reading.when) == (who, when)
    assert clash in reading.clash
    assert reading.lines[0].endswith("line 3")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("KeyError: \"Invalid mesh_dim_name ('fsdp',) specified. Valid mesh_dim_names are ['dp', 'tp'].\"", "'fsdp'"),
        ("ValueError: Expected device_mesh to have ndim=2 but got 1", "ndim=2"),
        ("ValueError: The arg 'group_size' (4) must not exceed the world size (3)", "groups of 4"),
        ("ValueError: Inconsistent compute device and `device_id` on rank 3: cuda:0 vs cuda:3", "cuda:0"),
        ("ValueError: optimizer got an empty parameter list", "no parameter"),
        ("KeyError: 'exp_avg'", "lacks exp_avg"),
        ("AttributeError: 'Parameter' object has no attribute 'placements'", "plain tensor"),
        ("AttributeError: `rope_freqs` is not an nn.Parameter", "rope_freqs is a buffer"),
        ("RuntimeError: zero-dimensional tensor (at position 1) cannot be concatenated", "without dimensions"),
        ("SafetensorError: Error while deserializing header: HeaderTooLarge", "cut off"),
        ("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598", "704 vs 598"),
        ("RuntimeError: Parent directory /out/step-500 does not exist.", "/out/step-500"),
        ("RuntimeError: Cannot concatenate overlapping meshes: [DeviceMesh((fsdp=4)), DeviceMesh((ep=2))]", "meshes"),
        ("NotImplementedError: Cannot copy out of meta tensor; no data!", "meta"),
        ("RuntimeError: Expected weight to be of same shape as normalized_shape, but got weight of shape [584] and "
         "normalized_shape = [1168]", "584"),
        ("RuntimeError: attempting to assign a gradient of size '[4]' to a tensor of size '[8]'", "another size"),
        ("AssertionError: Attempted to load weight (torch.Size([0])) into parameter (torch.Size([8, 4]))", "[8, 4]"),
        ("RuntimeError: setStorage: sizes [8, 4] requiring 128 out of bounds for storage of size 112", "16 fewer"),
        ("RuntimeError: 'weight' must be 2-D", "one rank's shard"),
        ("RuntimeError: The size of tensor a (1048576) must match the size of tensor b (64) at dimension 1", "flat"),
        ("ValueError: shard_dim=1 is not a valid data dimension for a 2D tensor", "shard_dim=1"),
        ("TypeError: Sender.push() got an unexpected keyword argument 'flush'", "argument flush"),
        ("AssertionError: Expects `FORWARD` state but got HandleTrainingState.IDLE", "does not expect"),
        ("RuntimeError: size mismatch for a.weight: copying a param with shape torch.Size([16, 8]) from checkpoint, "
         "the shape in current model is torch.Size([32, 24]).", "another model usually in both"),
    ],
)  # fmt: skip
def test_a_message_without_a_traceback_is_read_by_its_mechanism(
    tmp_path: pathlib.Path, raised: str, words: str
) -> None:
    reading = _read(tmp_path, "step 3", raised)
    assert words in reading.clash
    assert reading.decide


@pytest.mark.parametrize(
    ("frame", "raised", "when"),
    [
        ('torch/optim/adam.py", line 8, in __setstate__', "KeyError: 'step'", "a load"),
        ('soap/shampoo_optimizer.py", line 8, in __init__', "KeyError: 7", "the construction of the optimizer"),
        ('verl/model_merger/base.py", line 8, in merge_and_save', "ValueError: 7", "a merge of saved shards"),
    ],
    ids=["load", "construction", "merge"],
)
def test_a_load_a_construction_and_a_merge_are_told_apart(
    tmp_path: pathlib.Path, frame: str, raised: str, when: str
) -> None:
    assert _read(tmp_path, BEGIN, f'  File "{_SITE}/{frame}', "    x = y", raised).when == when


def test_an_assertion_is_read_from_its_line(tmp_path: pathlib.Path) -> None:
    lines = ["    assert isinstance(tensor, torch.distributed.tensor.DTensor)", "AssertionError"]
    for log in (lines, [BEGIN, '  File "/opt/merge.py", line 8, in run', *lines]):
        assert "tensor is a plain tensor" in _read(tmp_path, "strategy: fsdp", *log).clash


def test_the_message_of_a_fsdp1_assertion_is_read_behind_its_stack(tmp_path: pathlib.Path) -> None:
    frames = [f'  File "{_SITE}/torch/distributed/utils.py", line 144, in _p_assert', "    traceback.print_stack()"]
    explanation = explained(tmp_path, *frames, "Expects storage to be freed but got storage with size 4096")
    assert explanation.cause is not None
    assert explanation.cause.first.type == "AssertionError"
    assert explanation.reading is not None


def test_a_traceback_that_was_cut_off_is_read_by_its_frames(tmp_path: pathlib.Path) -> None:
    explanation = explained(tmp_path, BEGIN, f'  File "{_SITE}/torch/optim/adam.py", line 7, in step', "    self.up")
    assert explanation.showing == "cut"
    assert explanation.reading is not None
    assert (explanation.reading.who, explanation.reading.decide) == ("torch's optimizer", "")


def test_memory_that_runs_out_without_fsdp_in_the_log_has_no_candidates(tmp_path: pathlib.Path) -> None:
    raised = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert explained(tmp_path, raised).matches == ()
    assert explained(tmp_path, "strategy: fsdp", raised).matches != ()


def test_a_known_failure_and_another_cause_have_no_reading(tmp_path: pathlib.Path) -> None:
    assert explained(tmp_path, *traceback(UNSHARD.format(0))).reading is None
    assert explained(tmp_path, "OSError: [Errno 28] No space left on device").reading is None


@pytest.mark.parametrize(
    ("lines", "clash", "decide", "places"),
    [
        (["step 7 loss 0.9", "Resuming step 7", "step 8 loss: 3.25"], "loss is 3.25", "fsdp-doctor resume", (1, 2, 3)),
        (["{'loss': 1.0, 'grad_norm': 0.5}", "loaded checkpoint", "{'loss': 1.1, 'grad_norm': 60.0}"],
         "grad_norm is 60", "fsdp-doctor resume", (1, 2, 3)),
        (["Some weights of QwenForCausalLM were not initialized from the checkpoint and are newly initialized"],
         "QwenForCausalLM", "checkpoint verify", (1,)),
        (["[rank1]: saving to /c/step-2026-01", "[rank0]: saving to /c/step-2026-00"],
         "rank 1 saves to /c/step-2026-01", "checkpoint verify", (1, 2)),
        (["step:3 - actor/rollout_probs_diff_max:0.97"], "is 0.97", "fingerprint", (1,)),
        (["root - WARNING - DataLoader state is empty for dp rank 3, expected key dp_rank_3."],
         "position in the data", "fsdp-doctor resume", (1,)),
        (["UserWarning: Found missing adapter keys while loading"], "lora_B", "checkpoint verify", (1,)),
        (["{'loss': nan, 'grad_norm': 0.0}"], "NaN", "examine", (1,)),
        (["step 4 loss 11.93 grad_norm: 0.0"], "no gradient", "examine", (1,)),
        (["ERROR 12-04 14:11:23 [ema.py:49] Failed to save: FSDP does not support deepcopy"],
         "copied as an object", "state dict", (1,)),
        (["size mismatch for a.weight: copying a param with shape torch.Size([65667584]) from checkpoint, the sh"],
         "flat shard", "checkpoint verify", (1,)),
        (["h:1:2 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer with status=12"],
         "network", "NCCL", (1,)),
    ],
    ids=[
        *("loss", "gradient norm", "random weights", "two directories", "drift", "data", "adapter"),
        *("nan", "no gradient", "copy", "flat", "network"),
    ],
)  # fmt: skip
def test_a_symptom_without_an_exception_is_read(
    tmp_path: pathlib.Path, lines: list[str], clash: str, decide: str, places: tuple[int, ...]
) -> None:
    explanation = explained(tmp_path, *lines)
    assert explanation.showing == "nothing"
    assert explanation.reading is not None
    assert clash in explanation.reading.clash
    assert decide in explanation.reading.decide
    assert [line.rpartition(" ")[2] for line in explanation.reading.lines] == [str(place) for place in places]


@pytest.mark.parametrize(
    "lines",
    [
        ["step 7 loss 0.9", "step 8 loss 3.25"],
        ["step 7 loss 0.90", "loaded checkpoint", "step 8 loss 0.93"],
        ["[rank1]: saving to /c/step-1", "[rank0]: saving to /c/step-1"],
        ["[rank1]: saving to /c/step-1/rank_1", "[rank0]: saving to /c/step-1/rank_0"],
        ["step:3 - actor/rollout_probs_diff_max:0.04"],
    ],
    ids=["no load", "noise", "one directory", "a file for each rank", "rounding"],
)
def test_what_every_run_shows_is_no_symptom(tmp_path: pathlib.Path, lines: list[str]) -> None:
    assert explained(tmp_path, *lines).reading is None


def test_a_device_that_torchs_own_fsdp_asks_for_is_no_foreign_cause(tmp_path: pathlib.Path) -> None:
    frame = f'  File "{_SITE}/torch/distributed/fsdp/_fsdp_state.py", line 7, in run'
    raised = "AssertionError: Torch not compiled with CUDA enabled"
    assert not explained(tmp_path, BEGIN, frame, raised).foreign
    assert "CUDA" in _read(tmp_path, BEGIN, frame, raised).clash


def test_numbered_lines_within_the_fences_of_a_code_block_are_read(tmp_path: pathlib.Path) -> None:
    lines = [BEGIN, '  File "train.py", line 7, in run', "RuntimeError: Parent directory /out does not exist."]
    numbered = [f"{number} {line}" for number, line in enumerate([*["step"] * 6, *lines], start=508)]
    assert "/out" in _read(tmp_path, "```bash", *numbered, "```").clash


def test_a_mismatch_of_collectives_is_read_with_both_calls(tmp_path: pathlib.Path) -> None:
    calls = [
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType={operation}, "
        f"TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default)))"
        for rank, operation in enumerate(("ALLREDUCE", "BROADCAST"))
    ]
    raised = f"RuntimeError: Detected mismatch between collectives on ranks. {calls[0]}, but {calls[1]}."
    reading = _read(tmp_path, BEGIN, '  File "train.py", line 7, in <module>', raised)
    assert reading.clash == "rank 0 calls ALLREDUCE [4] where rank 1 calls BROADCAST [4]"


def test_names_that_the_log_cuts_off_still_show_their_prefix(tmp_path: pathlib.Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(60)]
    lists = [", ".join(f'"{prefix}{name}"' for name in names) for prefix in ("", "module.")]
    missing, unexpected = (f"\t{kind} key(s) in state_dict: {each}. " for kind, each in
                           zip(("Missing", "Unexpected"), lists, strict=True))  # fmt: skip
    frame = '  File "train.py", line 7, in <module>'
    raised = "RuntimeError: Error(s) in loading state_dict for Qwen3ForCausalLM:"
    assert "have the prefix module." in _read(tmp_path, BEGIN, frame, raised, missing, unexpected).clash


@pytest.mark.parametrize(
    ("raised", "clash", "decide"),
    [
        ("ValueError: Unrecognized model in step-9. Should have a `model_type` key in its config.json.",
         "step-9 has not what from_pretrained reads", "checkpoint convert step-9 NEW --to hf --config DIR"),
        ("OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory step-9.",
         "step-9 has not what from_pretrained reads", "checkpoint convert step-9 NEW --to hf --config DIR"),
        ("ValueError: Can't find 'adapter_config.json' at 'step-9'",
         "step-9 has no adapter_config.json", "checkpoint verify step-9"),
    ],
    ids=["no type", "no weights", "no adapter"],
)  # fmt: skip
def test_a_directory_of_another_format_leads_to_verify_and_convert(
    tmp_path: pathlib.Path, raised: str, clash: str, decide: str
) -> None:
    reading = _read(tmp_path, BEGIN, f'  File "{_SITE}/transformers/x.py", line 7, in from_pretrained', raised)
    assert clash in reading.clash
    assert decide in reading.decide
