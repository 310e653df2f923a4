"""``fsdp-doctor memory plan``: from a configuration to what it will hold, and its refusals."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from support.inside import Done, doctor
from support.places import TESTS

from fsdp_doctor.ledgers.ledger import ledgers_from_json

_CONFIGS = TESTS / "check" / "configs"
_VERL = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
)
_SMALL = ("--model", "small", "--seq-len", "256", "--micro-batch", "2")


def _plan(*arguments: str, config: tuple[str, ...] = _VERL) -> Done:
    given = [word for one in config for word in ("--config", one)]
    return doctor("memory", "plan", *given, *arguments)


def _fails(done: Done, code: int, *words: str) -> None:
    assert done.code == code, done.stderr
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


def test_every_role_the_engine_and_the_host_are_planned() -> None:
    done = _plan(*_SMALL, "--gpu-memory", "8GiB")
    assert done.code == 0, done.stderr
    for expected in (
        "actor: small, 0.00 billion parameters; fsdp2, offload none, in 2 shard(s); 2 x 256 tokens at once",
        "ref: small",
        "engine: 0.5 of a device, 4.0 GiB",
        "actor: trains",
        "ref: computes log-probabilities",
        "actor: weights taken out (state_dict.to.full_tensor)",
        "engine: starts",
        "engine: generates",
        "rank 0 gathers a full state dict",
        "every rank loads the checkpoint",
        "The highest: ",
        "Assumed:",
        "Not modelled:",
    ):
        assert expected in done.stdout


def test_what_does_not_fit_is_told_with_the_setting_that_makes_it_fit() -> None:
    done = _plan(
        *_SMALL, "--gpu-memory", "4500MiB", config=(*_VERL, "actor_rollout_ref.rollout.gpu_memory_utilization=0.9")
    )
    assert done.code == 1
    assert "engine: generates  does not fit" in done.stdout
    assert "gpu_memory_utilization=0." in done.stdout


def test_more_activations_than_the_device_has_are_brought_down_by_a_smaller_batch_or_checkpointing() -> None:
    sizes = ("--model", "small", "--seq-len", "4096", "--micro-batch", "16", "--gpu-memory", "5GiB")
    setting = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    done = _plan(*sizes, config=(*_VERL[:1], *_VERL[5:], setting))
    assert done.code == 1
    assert "actor: a micro batch of" in done.stdout


def test_each_offload_that_makes_it_fit_is_told() -> None:
    setting = "actor_rollout_ref.rollout.gpu_memory_utilization=0.57"
    done = _plan(
        "--model", "qwen3-4b", "--layers", "8", *_SMALL[2:], "--gpu-memory", "16.5GiB", config=(*_VERL, setting)
    )
    for setting in ("param_offload=true:", "optimizer_offload=true:", "param_offload=true and optimizer_offload=true:"):
        assert f"  actor: {setting}" in done.stdout
    assert "gpu_memory_utilization=0.52:" in done.stdout
    assert done.stdout.count("  gpu_memory_utilization=") == 1


def test_a_limit_smaller_than_the_model_is_said_and_no_setting_is_promised() -> None:
    done = _plan(*_SMALL, "--gpu-memory", "1MiB")
    assert done.code == 1
    assert "GiB are lacking" in done.stdout
    assert "No one setting makes it fit; the nearest:" in done.stdout


def test_the_host_can_be_what_does_not_hold_it() -> None:
    done = _plan(*_SMALL, "--host-memory", "4GiB")
    assert done.code == 1
    assert "The host does not hold it: " in done.stdout


def test_the_ledgers_of_the_first_and_the_last_rank_are_written(tmp_path: pathlib.Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert _plan(*_SMALL, "--json", str(file), "--svg", str(picture)).code == 0
    ledgers = ledgers_from_json(file.read_text())
    assert ledgers.origin == "predicted"
    assert {ledger.rank for ledger in ledgers.ledgers} == {0, 1}
    assert {ledger.job for ledger in ledgers.ledgers} == {"actor", "ref"}
    assert any("CUDA context" in note for note in ledgers.notes)
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "accelerate_v1.yaml",
            "accelerate_v2.yaml",
            "areal.yaml",
            "axolotl.yml",
            "lightning.yaml",
            "nemo_rl.yaml",
        ),
        *(
            "prime_rl.toml",
            "skyrl.sh",
            "swift.sh",
            "torchtitan.toml",
            "trainer.json",
            "verl_grpo.yaml",
        ),
        *("verl_lora.sh", "verl_sft.yaml", "verl_sft_old.sh", "verl_fsdp1.yaml"),
    ],
)
def test_every_framework_that_check_reads_is_planned(name: str) -> None:
    done = doctor("memory", "plan", "--config", str(_CONFIGS / name), *_SMALL, "--gpus", "4", "--nodes", "1")
    assert done.code in (0, 1), done.stderr
    assert "trains" in done.stdout


def test_the_model_of_a_configuration_is_known_by_its_name_on_the_hub() -> None:
    done = doctor("memory", "plan", "--config", str(_CONFIGS / "skyrl.sh"), "--layers", "2", "--seq-len", "128")
    assert "actor: qwen3-4b" in done.stdout


def test_bfloat16_shards_and_their_optimizer_take_half() -> None:
    bf16 = _plan(*_SMALL, config=(*_VERL, "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"))
    assert "in 2 shard(s), bfloat16;" in bf16.stdout
    held = [re.search(r"trained +held +([\d.,]+)", done.stdout) for done in (bf16, _plan(*_SMALL))]
    half, whole = (float(match[1].replace(",", "")) for match in held if match)
    assert half == pytest.approx(whole / 2, rel=0.02)


def test_a_directory_without_a_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    _fails(_plan("--model", str(tmp_path)), 2, "no config.json")


def test_a_configuration_that_transformers_cannot_build_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of nobody"}))
    _fails(_plan("--model", str(tmp_path)), 2, str(tmp_path), "transformers")


def test_code_that_a_model_brings_along_is_not_run(tmp_path: pathlib.Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": auto_map}))
    _fails(_plan("--model", str(tmp_path)), 2, "transformers cannot read its config.json")
    assert not ran.exists()


def test_a_model_whose_layers_are_given_their_input_by_name_is_planned(tmp_path: pathlib.Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = {"model_type": "bert", "is_decoder": True, "vocab_size": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    done = _plan("--model", str(tmp_path), "--seq-len", "64", "--micro-batch", "1")
    assert done.code == 0, done.stderr
    assert "actor: trains" in done.stdout


def test_more_layers_than_the_model_has_repeat_their_kinds() -> None:
    more, fewer = (_plan(*_SMALL, "--layers", layers).stdout for layers in ("6", "2"))
    assert "actor: trains" in more
    assert more != fewer
    _fails(_plan(*_SMALL, "--layers", "99999999999999999999"), 2, "--layers", "1000")


def test_an_unreadable_model_of_the_configuration_is_not_called_an_option(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = _plan(config=(*_VERL, f"actor_rollout_ref.model.path={tmp_path}"))
    _fails(done, 2, f"the model {tmp_path}", "config.json")
    assert "--model" not in done.stderr


def test_a_model_without_a_name_is_refused() -> None:
    _fails(_plan("--model", ""), 2, "--model", "nor a directory")


def test_an_unknown_shape_is_refused() -> None:
    _fails(_plan("--model", "qwen9-1t"), 2, "qwen9-1t", "qwen3-4b")


def test_a_model_that_is_not_here_and_no_known_shape_is_refused() -> None:
    _fails(_plan(config=(*_VERL, "actor_rollout_ref.model.path=org/of-nobody")), 2, "org/of-nobody", "--model")


@pytest.mark.parametrize("option", ["--gpus", "--nodes", "--seq-len", "--micro-batch", "--layers"])
def test_a_size_of_nothing_is_refused(option: str) -> None:
    _fails(_plan("--model", "small", option, "0"), 2, option)


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=-3",
        "data.max_response_length=-1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=-2",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=-4",
        "trainer.n_gpus_per_node=-8",
        "trainer.nnodes=0",
    ],
)
def test_a_number_below_1_in_the_configuration_is_refused(setting: str) -> None:
    _fails(_plan("--model", "small", config=(*_VERL, setting)), 2, setting, "at least 1")


@pytest.mark.parametrize("option", ["--gpu-memory", "--host-memory"])
def test_a_memory_of_a_few_bytes_is_taken_for_a_number_without_its_unit(option: str) -> None:
    _fails(_plan("--model", "small", option, "80"), 2, f"{option} 80", "80 bytes", "80GiB")


@pytest.mark.parametrize("model", ["~nobody-of-this-name/model", "x" * 5000])
def test_a_path_that_the_system_refuses_is_no_model(model: str) -> None:
    _fails(_plan("--model", model), 2, "--model", "nor a directory")
    _fails(_plan(config=(*_VERL, f"actor_rollout_ref.model.path={model}")), 2, "neither a directory", "--model")
    _fails(_plan(config=(f"{model}/verl.yaml",)), 2, "cannot read")


def test_more_layers_than_can_be_followed_are_refused_wherever_they_are_said(tmp_path: pathlib.Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 10**5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _fails(_plan("--model", str(tmp_path)), 2, "100000 layers", "at most 1000")
    _fails(_plan("--model", "small", "--layers", "1001"), 2, "'--layers'", "1000")


@pytest.mark.parametrize(
    "setting", ["critic.fsdp.fsdp_size=some", "actor_rollout_ref.actor.fsdp_config.fsdp_size=some"], ids=str
)
def test_a_role_that_cannot_be_read_is_not_left_out_of_the_plan(setting: str) -> None:
    config = (*_VERL, "algorithm.adv_estimator=gae", "critic.model.path=small", setting)
    _fails(_plan(*_SMALL, config=config), 3, "cannot be determined", setting)


def test_shards_in_float16_take_half_and_a_word_that_is_no_dtype_is_refused() -> None:
    dtype = "actor_rollout_ref.actor.fsdp_config.model_dtype="
    half, brain = (_plan(*_SMALL, config=(*_VERL, f"{dtype}{word}")) for word in ("torch.float16", "bf16"))
    assert half.stdout == brain.stdout
    _fails(_plan(*_SMALL, config=(*_VERL, f"{dtype}fp9")), 2, f"{dtype}fp9", "no dtype of shards")


def test_an_engine_that_is_cut_into_more_parts_than_there_are_devices_is_refused() -> None:
    setting = "actor_rollout_ref.rollout.tensor_model_parallel_size=16"
    _fails(_plan(*_SMALL, config=(*_VERL, setting)), 2, setting, "2 devices")


def test_a_shard_group_that_does_not_divide_the_ranks_is_refused() -> None:
    setting = "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"
    _fails(_plan(*_SMALL, "--gpus", "8", config=(*_VERL, setting)), 2, "3 ranks", "8 ranks")


def test_a_shard_group_of_no_ranks_is_refused_and_a_negative_one_is_all() -> None:
    setting = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    _fails(_plan(*_SMALL, config=(*_VERL, f"{setting}=0")), 3, f"{setting}=0", "a group of no ranks", "all are -1")
    assert "in 2 shard(s)" in _plan(*_SMALL, config=(*_VERL, f"{setting}=-1")).stdout


def test_more_tokens_than_torch_can_count_the_bytes_of_are_refused() -> None:
    _fails(_plan("--model", "small", "--micro-batch", "99999999999999999999"), 2, "1,000,000,000 at once")


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        (("trainer.n_gpus_per_node=8", "trainer.nnodes=4"), (), (8, 4)),
        (("trainer.n_gpus_per_node=4", "trainer.nnodes=4"), (), (4, 4)),
        (("trainer.n_gpus_per_node=4", "trainer.nnodes=4"), ("--gpus", "8"), (8, 4)),
        (("trainer.n_gpus_per_node=8",), ("--nodes", "2"), (8, 2)),
        (("trainer.n_gpus_per_node=8", "trainer.nnodes=4"), ("--gpus", "2", "--nodes", "1"), (2, 1)),
    ],
)
def test_devices_and_nodes_are_as_configured_and_an_option_replaces_its_own_number_alone(
    settings: tuple[str, ...], options: tuple[str, ...], expected: tuple[int, int]
) -> None:
    done = _plan(*_SMALL, *options, config=(*_VERL, *settings))
    gpus, nodes = expected
    assert f"verl: {nodes} node{'s' if nodes > 1 else ''} with {gpus} devices" in done.stdout
    assert f"in {gpus * nodes} shard(s)" in done.stdout


def test_more_ranks_than_any_parameter_has_rows_are_refused() -> None:
    _fails(_plan(*_SMALL, "--gpus", "8", "--nodes", "1024"), 2, "8192 ranks", "4096 rows")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("skyrl.sh", "trainer.placement.colocate_all=false"),
        ("nemo_rl.yaml", "policy.generation.colocated.enabled=false"),
    ],
)
def test_an_engine_that_is_not_colocated_is_on_devices_of_its_own(name: str, setting: str) -> None:
    engine = "policy.generation.backend=vllm" if name == "nemo_rl.yaml" else "generator.backend=vllm"
    together, apart = (_plan(*_SMALL, config=(str(_CONFIGS / name), engine, *more)).stdout for more in ((), (setting,)))
    assert "engine: generates" in together
    assert "engine, on devices of its own" in apart
    assert "engine: generates" not in apart
    assert "engine, asleep" not in apart


def test_an_engine_whose_cache_is_not_freed_keeps_its_share_while_the_trainer_works() -> None:
    setting = "actor_rollout_ref.rollout.free_cache_engine=false"
    done = _plan(*_SMALL, "--gpu-memory", "5GiB", config=(*_VERL, setting))
    trains = done.stdout.partition("actor: trains")[2].partition("actor: weights")[0]
    assert "engine, its share 2.5" in trains
    assert "engine, asleep" not in done.stdout


def test_a_share_of_the_device_that_is_none_is_refused() -> None:
    setting = "actor_rollout_ref.rollout.gpu_memory_utilization=1.5"
    _fails(_plan(*_SMALL, config=(*_VERL, setting)), 2, setting)


def test_an_unknown_framework_is_refused() -> None:
    _fails(_plan(*_SMALL, config=("a.b=1",)), 2, "not a configuration of a supported framework")


def test_a_run_of_another_engine_is_no_fsdp() -> None:
    _fails(_plan(*_SMALL, config=(str(_CONFIGS / "verl_megatron.sh"),)), 3, "no FSDP")
