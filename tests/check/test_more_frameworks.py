"""`fsdp-doctor check` reads the configurations of each framework that it names, and says of others what they are."""

from __future__ import annotations

import pathlib

import pytest
from support.checked import CONFIGS, cases_of_roles, checked, of_kind, said, use_of

from fsdp_doctor.check import CheckResult, cases, check
from fsdp_doctor.errors import UsageError


def _short(result: CheckResult) -> dict[str, str]:
    """By role the scenario, or why there is none."""
    return {use.role: use.scenario.id if use.scenario else use.why_not for use in result.uses}


@pytest.mark.parametrize(
    ("file", "version", "framework", "expected", "ranks"),
    [
        ("axolotl.yml", "0.12.0", "axolotl", {"model": "fsdp1-orig/policy/unstaged/qwen3-lora"}, None),
        ("torchtune.yaml", "0.6.1", "torchtune", {"model": "fsdp2/policy/unstaged/hsdp"}, None),
        ("torchtune.yaml", "0.2.1", "torchtune", {"model": "fsdp1/policy/unstaged/device-only/hsdp"}, None),
        (
            "areal.yaml",
            "1.0.4",
            "AReaL",
            {"actor": "fsdp2/policy/unstaged/device-only", "ref": "fsdp2/none/unstaged/device-only"},
            4,
        ),
        ("nemo_rl.yaml", "0.7.0", "NeMo-RL", {"actor": "fsdp2/policy/unstaged/unpinned"}, 8),
        ("nemo_rl.yaml", "0.4.0", "NeMo-RL", {"actor": "fsdp2/policy/unstaged/device-only/unpinned"}, 8),
        ("prime_rl.toml", "0.8.0", "prime-rl", {"actor": "fsdp2/policy/unstaged/hsdp"}, 4),
        (
            "skyrl.sh",
            "0.3.0",
            "SkyRL",
            {"actor": "fsdp2/param+optimizer/unstaged/nonblocking", "ref": "fsdp2/param/unstaged/nonblocking"},
            4,
        ),
        ("swift.sh", "4.5.2", "ms-swift", {"model": "fsdp2/policy/unstaged/device-only"}, 2),
        ("trainer_flags.sh", "4.56", "Hugging Face Trainer", {"model": "fsdp1-orig/policy/unstaged/device-only"}, 8),
        ("trainer.py", "5.9", "Hugging Face Trainer", {"model": "fsdp1/policy/unstaged/device-only"}, None),
        ("accelerate_launch.sh", "1.10", "accelerate", {"model": "fsdp1/none/unstaged/device-only"}, 6),
        ("report.md", "1.10", "accelerate", {"model": "fsdp2/policy/unstaged"}, 4),
        ("accelerate_env.md", "1.10", "accelerate", {"model": "fsdp2/policy/unstaged"}, 2),
        ("documents.yaml", "1.10", "accelerate", {"model": "fsdp2/none/unstaged/device-only"}, None),
        ("lightning.py", "2.5", "Lightning", {"model": "fsdp1-orig/policy/unstaged/device-only/hsdp"}, 8),
        ("lightning.py", "2.0.9", "Lightning", {"model": "fsdp1/policy/unstaged/device-only/hsdp"}, 8),
        ("lightning_fsdp2.py", "2.5", "Lightning", {"model": "fsdp2/policy/unstaged/device-only"}, 2),
        ("verl_sft_old.sh", "0.6.1", "verl", {"model": "fsdp1/policy/unstaged/device-only"}, 8),
        ("verl_lora.sh", "0.9.0", "verl", {"actor": "fsdp1/none/unstaged/qwen3-lora"}, 8),
    ],
)
def test_a_configuration_is_read_as_its_framework_would(
    file: str, version: str, framework: str, expected: dict[str, str], ranks: int | None
) -> None:
    result = checked(file, version=version)
    assert result.framework.startswith(framework)
    assert _short(result) == expected
    assert result.world_size == ranks


@pytest.mark.parametrize(
    ("arguments", "framework", "why"),
    [
        (["verl_megatron.sh"], "verl", "config_name=ppo_megatron_trainer.yaml"),
        (["actor_rollout_ref.actor.megatron.param_offload=true", "trainer.nnodes=1"], "verl", "megatron"),
        (["actor_rollout_ref.model.path=x", "model_engine=megatron"], "verl", "model_engine=megatron"),
        (["openrlhf.sh"], "OpenRLHF", "OpenRLHF trains with DeepSpeed"),
        (["zero_optimization.stage=3"], "DeepSpeed", "DeepSpeed trains"),
        (["axolotl.yml", "fsdp=null", "~fsdp_config", "deepspeed=zero3.json"], "axolotl", "deepspeed=zero3.json"),
        (["actor.backend=megatron:d4t2", "cluster.n_nodes=1"], "AReaL", "actor.backend=megatron:d4t2"),
        (["nemo_rl.yaml", "policy.megatron_cfg.enabled=true"], "NeMo-RL", "policy.megatron_cfg.enabled=true"),
        (["skyrl.sh", "trainer.strategy=megatron"], "SkyRL", "trainer.strategy=megatron"),
        (["distributed_type=MEGATRON_LM"], "accelerate", "distributed_type=MEGATRON_LM"),
    ],
)
def test_what_another_engine_trains_is_said_to_be_not_fsdp_and_never_passes(
    arguments: list[str], framework: str, why: str
) -> None:
    result = checked(*arguments)
    assert result.framework == framework
    assert all(use.why_not.startswith("not under FSDP") and why in use.why_not for use in result.uses)
    assert (cases(result), result.exit_code) == ([], 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["actor_rollout_ref.model.path=x", "model_engine=veomni"], "this engine of verl has an FSDP of its own"),
        (["actor_rollout_ref.model.path=x", "config_name=my_trainer"], "what that configuration sets is not known"),
        (["actor.backend=archon:d8", "cluster.n_nodes=1"], "the Archon engine has an FSDP of its own"),
        (["policy.dtensor_cfg.cpu_offload=true"], "policy.dtensor_cfg.enabled is not in the configuration"),
        (["distributed_type=FSDP2"], "is not one of accelerate's engines"),
    ],
)
def test_what_decides_and_cannot_be_read_is_said_and_never_passes(arguments: list[str], sentence: str) -> None:
    result = checked(*arguments)
    assert sentence in said(result, "unknown")
    assert (cases(result), result.determined, result.exit_code) == ([], False, 3)


def test_an_unknown_key_alone_is_no_framework() -> None:
    for arguments in (["critic.model_name=x", "actor.model_name=y"], ["training.verl_config.actor=1"]):
        with pytest.raises(UsageError, match="not a configuration of a supported framework"):
            checked(*arguments)


def test_a_script_that_calls_torch_itself_is_said_to_be_that(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n")
    result = check([str(script)])
    assert "the script calls torch's FSDP itself" in said(result, "unknown")
    assert result.exit_code == 3


# verl


def test_a_reference_model_is_built_before_v0_4_whatever_asks_for_it() -> None:
    asked = ["actor_rollout_ref.actor.strategy=fsdp", "algorithm.adv_estimator=grpo"]
    assert set(_short(checked(*asked, version="0.2.0"))) == {"actor", "ref"}
    assert set(_short(checked(*asked, version="0.4.0"))) == {"actor"}
    assert use_of(checked(*asked, version="0.2.0"), "actor").scenario.backend == "device-only"
    assert use_of(checked(*asked, version="0.3.0"), "actor").scenario.backend == "mixed"


def test_with_an_adapter_the_actor_is_the_reference() -> None:
    result = checked("verl_lora.sh", version="0.9.0")
    assert set(_short(result)) == {"actor"}
    assert "ref_in_actor" in said(result, "note")
    assert set(_short(checked("verl_lora.sh", "actor_rollout_ref.model.lora_rank=0", version="0.9.0"))) == {
        "actor",
        "ref",
    }


def test_the_old_sft_trainer_has_fsdp2_by_default_since_v0_4_and_hands_it_the_offload_of_fsdp1() -> None:
    before = checked("verl_sft_old.sh", "~model.strategy", version="0.3.0")
    since = checked("verl_sft_old.sh", "~model.strategy", version="0.4.0")
    assert _short(before) == {"model": "fsdp1/policy/unstaged/device-only"}
    assert _short(since) == {"model": "fsdp2/none/unstaged/device-only"}
    assert "hands FSDP2 what is FSDP1's offload" in said(since, "conflict")
    assert not of_kind(before, "conflict")


@pytest.mark.parametrize(
    ("version", "path"),
    [("0.4.0", "get_model_state_dict.full+cpu"), ("0.5.0", "state_dict")],
)
def test_the_old_sft_trainer_saves_the_whole_model_before_v0_5_and_shards_since(version: str, path: str) -> None:
    result = checked("model.partial_pretrain=x", "model.strategy=fsdp2", version=version)
    assert cases_of_roles(result)["model"] == [f"fsdp2/none/unstaged/device-only/{path}"]


def test_a_version_that_does_not_know_what_is_asked_for_is_said() -> None:
    result = checked("verl_grpo.yaml", version="0.2.0")
    assert "that version of verl does not know what these settings ask for" in said(result, "unknown")
    assert result.exit_code == 3


def test_fsdp1_syncs_whole_tensors_where_the_rollout_loads_hf_weights() -> None:
    asked = ["actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.rollout.load_format=dummy_hf"]
    found = cases_of_roles(checked(*asked, "trainer.use_legacy_worker_impl=enable", version="0.5.0"))
    assert found["actor"] == ["fsdp1/none/unstaged/full_state_dict"]


# Others


def test_a_flag_of_accelerate_launch_goes_before_its_file_and_a_file_that_is_not_here_is_asked_for(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file nowhere.yaml --num_processes 2 train.py\n")
    result = check([str(script)])
    assert "nowhere.yaml is not here; give that file beside the command" in said(result, "unknown")
    assert result.exit_code == 3
    beside = check([str(script), str(CONFIGS / "accelerate_v2.yaml")], framework_version="1.10")
    assert use_of(beside, "model").scenario.strategy == "fsdp2"
    assert beside.world_size == 2
    script.write_text("accelerate launch --use_fsdp --fsdp_version 2 --fsdp-offload-params true train.py\n")
    assert _short(check([str(script)], framework_version="1.10")) == {"model": "fsdp2/policy/unstaged"}


def test_accelerates_mesh_with_replicas_is_hsdp() -> None:
    replicas = "parallelism_config.parallelism_config_dp_replicate_size=2"
    result = checked("distributed_type=FSDP", "fsdp_config.fsdp_version=2", replicas, version="1.10")
    assert use_of(result, "model").scenario.sharding == "hsdp"


def test_a_plugin_in_python_is_accelerates_configuration(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)\n")
    assert _short(check([str(script)], framework_version="1.10")) == {"model": "fsdp2/policy/unstaged"}


def test_the_trainer_does_not_read_accelerates_name_of_the_offload() -> None:
    result = checked("fsdp=full_shard", "output_dir=out", "fsdp_config.offload_params=true", version="5.20")
    assert "offload_params is accelerate's name" in said(result, "conflict")
    assert use_of(result, "model").scenario.offload == "none"


def test_prime_rls_optimizer_is_offloaded_by_default_since_v0_7() -> None:
    asked = ["model.name=x", "model.dp_replicate=1"]
    assert use_of(checked(*asked, version="0.6.0"), "actor").scenario.offload == "none"
    assert use_of(checked(*asked, version="0.7.0"), "actor").scenario.offload == "optimizer"
    assert use_of(checked(*asked, "model.optim_cpu_offload=false", version="0.7.0"), "actor").scenario.offload == "none"


def test_lightnings_model_parallel_strategy_under_the_policy_is_a_conflict() -> None:
    assert "refuses under CPUOffloadPolicy" in said(checked("lightning_fsdp2.py"), "conflict")


def test_a_model_parallel_strategy_whose_fully_shard_is_elsewhere_is_not_said_to_have_no_policy(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "fit.py"
    script.write_text("import lightning as L\nfabric = L.Fabric(strategy=ModelParallelStrategy(), devices=4)\n")
    result = check([str(script)])
    assert "whether it has a policy is not known" in said(result, "note")
    script.write_text(script.read_text() + "fully_shard(model)\n")
    assert "policy" not in said(check([str(script)]), "note")


@pytest.mark.parametrize(
    ("written", "offload"),
    [("CPUOffload(True)", "policy"), ("fsdp.CPUOffload(offload_params=True)", "policy"), ("CPUOffload()", "none")],
)
def test_accelerates_plugin_takes_torchs_own_word_of_the_offload(
    tmp_path: pathlib.Path, written: str, offload: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"plugin = FullyShardedDataParallelPlugin(use_orig_params=True, cpu_offload={written})\n")
    assert use_of(check([str(script)], framework_version="1.10"), "model").scenario.offload == offload


def test_a_recipe_of_torchtune_for_one_device_is_not_fsdp(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "8B_lora_single_device.yaml"
    file.write_text("model: {_component_: torchtune.models.llama3.llama3_8b}\noptimizer: {lr: 1.0}\n")
    assert check([str(file)]).exit_code == 3
