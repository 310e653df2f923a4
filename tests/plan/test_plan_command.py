"""``fsdp-doctor memory plan``: from a configuration to what it will hold, and its refusals."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from support.inside import Done, doctor
from support.places import TESTS

from fsdp_doctor.examination.memory_records import read_memory_file

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
    return doctor("memory", "plan", *given, *arguments, env={"COLUMNS": "1000"})


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
        "The job fits: ",
        "Assumed:",
        "Not modelled:",
    ):
        assert expected in done.stdout


def test_a_model_alone_is_planned_as_plain_fsdp2(tmp_path: pathlib.Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512, **sizes}))
    alone = doctor("memory", "plan", str(tmp_path), "--gpus", "2", *_SMALL[2:], env={"COLUMNS": "1000"})
    configured = _plan(
        *("--model", str(tmp_path), "--gpus", "2", *_SMALL[2:]),
        config=("distributed_type=FSDP", "fsdp_config.fsdp_version=2"),
    )
    assert alone.code == 0, alone.stderr
    assert "fsdp2, offload none, in 2 shard(s); 2 x 256 tokens at once" in " ".join(alone.stdout.split())
    assert alone.stdout == configured.stdout


def test_stages_of_an_offload_are_printed_only_with_an_offload() -> None:
    offloaded = "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    # verl places the reference model by the policy, whatever is configured.
    actor = tuple(setting for setting in _VERL if "kl_loss" not in setting)
    none, some = (_plan(*_SMALL, config=config).stdout for config in (actor, (*actor, offloaded)))
    assert [line for line in none.splitlines() if line.lstrip().startswith("offloaded")] == []
    assert [line.split()[0] for line in some.splitlines() if line.lstrip().startswith("offloaded")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--config", "directory")),
        (("small", "--config", "a.b=1"), ("small", "--model")),
        (("small", "--model", "small"), ("small", "--model")),
        (("nowhere",), ("nowhere", "config.json")),
    ],
)
def test_a_plan_is_of_a_configuration_or_of_a_model(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    _fails(doctor("memory", "plan", *arguments), 2, *words)


def test_a_plan_that_does_not_fit_names_a_setting_that_helps() -> None:
    done = _plan(
        *_SMALL, "--gpu-memory", "4500MiB", config=(*_VERL, "actor_rollout_ref.rollout.gpu_memory_utilization=0.9")
    )
    assert done.code == 1
    assert "engine: generates  does not fit" in done.stdout
    assert "gpu_memory_utilization=0." in done.stdout


def test_a_smaller_batch_or_checkpointing_is_advised_for_too_many_activations() -> None:
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


def test_a_limit_below_the_models_size_is_reported_without_promising_a_setting() -> None:
    done = _plan(*_SMALL, "--gpu-memory", "1MiB")
    assert done.code == 1
    assert "GiB are missing" in " ".join(done.stdout.split())
    assert "No single setting makes the job fit; the nearest are:" in done.stdout


def test_the_host_can_be_what_does_not_hold_it() -> None:
    done = _plan(*_SMALL, "--host-memory", "4GiB")
    assert done.code == 1
    assert done.stdout.startswith("The job does not fit on the host: ")


def test_the_ledgers_of_the_first_and_the_last_rank_are_written(tmp_path: pathlib.Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert _plan(*_SMALL, "--json", str(file), "--svg", str(picture)).code == 0
    memory_file = read_memory_file(file.read_text())
    assert memory_file.origin == "predicted"
    assert {memory.rank for memory in memory_file.ledgers} == {0, 1}
    assert {memory.job for memory in memory_file.ledgers} == {"actor", "ref"}
    assert any("CUDA context" in note for note in memory_file.notes)
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
        *("verl_lora.sh", "verl_sft.yaml", "verl_sft_old.sh"),
    ],
)
def test_every_framework_that_check_reads_is_planned(name: str) -> None:
    done = doctor("memory", "plan", "--config", str(_CONFIGS / name), *_SMALL, "--gpus", "4", "--nodes", "1")
    assert done.code in (0, 1), done.stderr
    assert "trains" in done.stdout


def test_the_model_of_a_configuration_is_recognized_by_its_hub_name() -> None:
    done = doctor("memory", "plan", "--config", str(_CONFIGS / "skyrl.sh"), "--layers", "2", "--seq-len", "128")
    assert "actor: qwen3-4b" in done.stdout


def test_bfloat16_shards_and_their_optimizer_take_half() -> None:
    bf16 = _plan(*_SMALL, config=(*_VERL, "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"))
    assert "in 2 shard(s), bfloat16;" in bf16.stdout
    held = [re.search(r"trained +held +([\d.,]+)", done.stdout) for done in (bf16, _plan(*_SMALL))]
    half, whole = (float(match[1].replace(",", "")) for match in held if match)
    assert half == pytest.approx(whole / 2, rel=0.02)


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


@pytest.mark.parametrize(
    "setting", ["critic.fsdp.fsdp_size=some", "actor_rollout_ref.actor.fsdp_config.fsdp_size=some"], ids=str
)
def test_an_unreadable_role_is_not_omitted_from_the_plan(setting: str) -> None:
    config = (*_VERL, "algorithm.adv_estimator=gae", "critic.model.path=small", setting)
    _fails(_plan(*_SMALL, config=config), 3, "cannot be determined", setting)


def test_shards_in_float16_take_half() -> None:
    dtype = "actor_rollout_ref.actor.fsdp_config.model_dtype="
    half, brain = (_plan(*_SMALL, config=(*_VERL, f"{dtype}{word}")) for word in ("torch.float16", "bf16"))
    assert half.stdout == brain.stdout


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
def test_devices_and_nodes_are_as_configured_unless_an_option_replaces_the_number(
    settings: tuple[str, ...], options: tuple[str, ...], expected: tuple[int, int]
) -> None:
    done = _plan(*_SMALL, *options, config=(*_VERL, *settings))
    gpus, nodes = expected
    assert f"verl: {nodes} node{'s' if nodes > 1 else ''} with {gpus} devices" in done.stdout
    assert f"in {gpus * nodes} shard(s)" in done.stdout


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
    assert "engine, on separate devices" in apart
    assert "engine: generates" not in apart
    assert "engine, asleep" not in apart


def test_an_engine_that_keeps_its_cache_holds_its_share_during_training() -> None:
    setting = "actor_rollout_ref.rollout.free_cache_engine=false"
    done = _plan(*_SMALL, "--gpu-memory", "5GiB", config=(*_VERL, setting))
    trains = done.stdout.partition("actor: trains")[2].partition("actor: weights")[0]
    assert "engine, its share 2.5" in trains
    assert "engine, asleep" not in done.stdout


_ROLLOUT = "actor_rollout_ref.rollout"
_SHARD_GROUP = "actor_rollout_ref.actor.fsdp_config.fsdp_size"


@pytest.mark.parametrize(
    ("setting", "options", "code", "words"),
    [
        *(
            (setting, (), 2, ("at least 1",))
            for setting in (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=-3",
                "data.max_response_length=-1",
                f"{_ROLLOUT}.tensor_model_parallel_size=-2",
                f"{_ROLLOUT}.update_weights_bucket_megabytes=-4",
                "trainer.n_gpus_per_node=-8",
                "trainer.nnodes=0",
            )
        ),
        (f"{_ROLLOUT}.tensor_model_parallel_size=16", (), 2, ("2 devices",)),
        (f"{_ROLLOUT}.gpu_memory_utilization=1.5", (), 2, ()),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp9", (), 2, ("is not a dtype of shards",)),
        (f"{_SHARD_GROUP}=0", (), 3, ("a group without ranks", "use -1 for all ranks")),
        (f"{_SHARD_GROUP}=3", ("--gpus", "8"), 2, ("3 ranks", "8 ranks")),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_planned_is_refused(
    setting: str, options: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    named = setting if "=3" not in setting else ""
    _fails(_plan("--model", "small", *options, config=(*_VERL, setting)), code, named, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(((option, "0"), (option,)) for option in ("--gpus", "--nodes", "--seq-len", "--micro-batch", "--layers")),
        *(((option, "80"), (f"{option} 80", "80 bytes", "80GiB")) for option in ("--gpu-memory", "--host-memory")),
        (("--layers", "1001"), ("--layers", "1000")),
        (("--model", ""), ("--model",)),
        (("--model", "qwen9-1t"), ("qwen9-1t", "qwen3-4b")),
        (("--model", "~nobody-of-this-name/model"), ("--model",)),
        (("--model", "x" * 5000), ("--model",)),
        (("--micro-batch", "99999999999999999999"), ("1,000,000,000 at once",)),
        (("--gpus", "8", "--nodes", "1024"), ("8192 ranks", "4096 rows")),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_planned_is_refused(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    model = () if "--model" in options else ("--model", "small")
    done = _plan(*model, *options)
    assert done.code == 2
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ("no config.json",)),
        ("{", ("config.json",)),
        ('{"model_type": "of nobody"}', ("transformers",)),
        ('{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 100000}', ("100000 layers", "at most 1000")),
    ],
)
def test_a_directory_that_is_no_model_is_refused(
    config: str | None, words: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    done = _plan(config=(*_VERL, f"actor_rollout_ref.model.path={tmp_path}"))
    _fails(done, 2, str(tmp_path), *words)
    assert "--model" not in done.stderr


@pytest.mark.parametrize("model", ["org/of-nobody", "~nobody-of-this-name/model", "x" * 5000])
def test_a_configured_model_that_is_not_here_is_refused(model: str) -> None:
    _fails(_plan(config=(*_VERL, f"actor_rollout_ref.model.path={model}")), 2, "neither a directory", "--model")


@pytest.mark.parametrize(
    ("config", "code", "word"),
    [
        ("a.b=1", 2, "not a configuration of a supported framework"),
        (str(_CONFIGS / "verl_megatron.sh"), 3, "no FSDP"),
        (f"{'x' * 5000}/verl.yaml", 2, "cannot read"),
    ],
    ids=["unknown", "megatron", "unreadable"],
)
def test_a_configuration_without_fsdp_is_refused(config: str, code: int, word: str) -> None:
    _fails(_plan(*_SMALL, config=(config,)), code, word)


_POLICY = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
_SAVES = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]")
_ACTOR = (_VERL[0], *_VERL[5:])
_MODEL = ("--model", "qwen3-4b", "--layers", "4", "--seq-len", "128", "--micro-batch", "1")


def _plan_host(*settings: str, host: str) -> Done:
    return _plan(*_MODEL, "--host-memory", host, config=(*_ACTOR, *settings))


def test_a_way_to_load_or_save_that_nobody_configured_does_not_decide() -> None:
    done = _plan_host(host="8GiB")
    assert done.code == 0, done.stderr
    certain, _, hypothetical = done.stdout.partition("if the job loads or saves in this way")
    assert "does not fit" not in certain
    assert "rank 0 gathers a full state dict  would not fit" in hypothetical
    assert "every rank loads the checkpoint  would not fit" in hypothetical


def test_a_checkpoint_that_is_gathered_on_rank_0_decides() -> None:
    done = _plan_host(*_SAVES, host="8GiB")
    assert done.code == 1
    certain = done.stdout.partition("if the job loads or saves in this way")[0]
    assert "rank 0 gathers a full state dict  does not fit" in certain
    assert "does not fit on the host: rank 0 gathers a full state dict takes " in done.stdout


def test_less_offload_is_told_where_only_the_host_is_too_small() -> None:
    done = _plan_host(_POLICY, host="10GiB")
    assert done.code == 1
    assert "does not fit on the host: offloaded takes " in done.stdout
    assert "  actor: no offload: then " in done.stdout


def test_where_nothing_helps_the_nearest_are_told_by_what_the_host_lacks() -> None:
    done = _plan_host(_POLICY, host="5GiB")
    nearest = done.stdout.partition("No single setting makes the job fit; the nearest are:\n")[2]
    assert nearest.startswith("  actor: no offload: then 6.0 GiB in the host: offloaded; its cost: ")
