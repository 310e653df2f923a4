"""`fsdp-doctor check` reads the configurations of each framework as the framework would."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from msgspec import ValidationError
from support.checked import CONFIGS, GOOD, cases_of_roles, checked, ids, loads, of_kind, said, use_of

from fsdp_doctor.check import CheckResult, check, frameworks, list_cases, parse_version, set_ranks
from fsdp_doctor.check.framework import (
    FrameworkFacts,
    FsdpFramework,
    KeyTable,
    ModelReading,
    VersionRange,
    select_matching,
)
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.check.frameworks.verl import Verl
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, make_extraction_point
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AxisName
from fsdp_doctor.matrix.cases import Scenario, parse_case_id
from fsdp_doctor.matrix.methods import METHOD_NAMES, list_methods

ACTOR = "actor_rollout_ref.actor"


def _scenarios(result: CheckResult) -> dict[str, str]:
    """Maps each role to the scenario, or to why there is none."""
    return {use.role: use.scenario.id if use.scenario else use.why_not for use in result.uses}


@pytest.mark.parametrize("file", GOOD)
def test_every_case_that_is_named_can_be_given_to_probe(file: str) -> None:
    named = list_cases(checked(file))
    assert named
    for case in named:
        assert parse_case_id(case.id, METHOD_NAMES) == case
        assert case.method in {method.name for method in list_methods(case.scenario)}


@pytest.mark.parametrize(
    ("file", "version", "framework", "expected", "ranks"),
    [
        ("axolotl.yml", "0.12.0", "axolotl", {"model": "fsdp1-orig/policy/unstaged/qwen3-lora"}, None),
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
        ("accelerate_launch.sh", "1.10", "accelerate", {"model": "fsdp1/none/unstaged/device-only"}, 6),
        ("accelerate_v1.yaml", "1.6.0", "accelerate", {"model": "fsdp1/policy/unstaged/device-only"}, 8),
        ("accelerate_v1.yaml", "1.7", "accelerate", {"model": "fsdp1/policy/unstaged"}, 8),
        ("documents.yaml", "1.10", "accelerate", {"model": "fsdp2/none/unstaged/device-only"}, None),
        ("lightning.yaml", "2.5", "Lightning", {"model": "fsdp1-orig/policy/unstaged/device-only/hsdp"}, 8),
        ("lightning.yaml", "2.0.9", "Lightning", {"model": "fsdp1/policy/unstaged/device-only/hsdp"}, 8),
        ("torchtitan.toml", "0.2.2", "torchtitan", {"model": "fsdp2/policy/unstaged/hsdp"}, None),
        ("verl_sft_old.sh", "0.6.1", "verl", {"model": "fsdp1/policy/unstaged/device-only"}, 8),
        ("verl_lora.sh", "0.9.0", "verl", {"actor": "fsdp1/none/unstaged/qwen3-lora"}, 8),
    ],
)
def test_a_configuration_is_read_as_its_framework_would(
    file: str, version: str, framework: str, expected: dict[str, str], ranks: int | None
) -> None:
    result = checked(file, version=version)
    assert result.framework.startswith(framework)
    assert (_scenarios(result), result.world_size) == (expected, ranks)


@pytest.mark.parametrize(
    ("arguments", "framework", "why"),
    [
        (["verl_megatron.sh"], "verl", "config_name=ppo_megatron_trainer.yaml"),
        (["actor_rollout_ref.actor.megatron.param_offload=true", "trainer.nnodes=1"], "verl", "megatron"),
        (["actor_rollout_ref.model.path=x", "model_engine=megatron"], "verl", "model_engine=megatron"),
        (["openrlhf.sh"], "OpenRLHF", "DeepSpeed"),
        (["zero_optimization.stage=3"], "DeepSpeed", "DeepSpeed"),
        (["axolotl.yml", "fsdp=null", "~fsdp_config", "deepspeed=zero3.json"], "axolotl", "deepspeed=zero3.json"),
        (["actor.backend=megatron:d4t2", "cluster.n_nodes=1"], "AReaL", "actor.backend=megatron:d4t2"),
        (["nemo_rl.yaml", "policy.megatron_cfg.enabled=true"], "NeMo-RL", "policy.megatron_cfg.enabled=true"),
        (["skyrl.sh", "trainer.strategy=megatron"], "SkyRL", "trainer.strategy=megatron"),
        (["trainer.strategy.class_path=lightning.pytorch.strategies.DDPStrategy"], "Lightning", "DDPStrategy"),
        (["distributed_type=MEGATRON_LM"], "accelerate", "distributed_type=MEGATRON_LM"),
    ],
)
def test_what_another_engine_trains_is_not_fsdp_and_never_passes(
    arguments: list[str], framework: str, why: str
) -> None:
    result = checked(*arguments)
    assert result.framework == framework
    assert all(use.why_not.startswith("not under FSDP") and why in use.why_not for use in result.uses)
    assert (list_cases(result), result.exit_code) == ([], 3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["actor_rollout_ref.model.path=x", "model_engine=veomni"], "model_engine=veomni"),
        (["actor_rollout_ref.model.path=x", "config_name=my_trainer"], "config_name=my_trainer"),
        (["actor.backend=archon:d8", "cluster.n_nodes=1"], "actor.backend=archon:d8"),
        (["policy.dtensor_cfg.cpu_offload=true"], "policy.dtensor_cfg.enabled"),
        (["distributed_type=FSDP2"], "distributed_type=FSDP2"),
        (["verl_grpo.yaml", "actor_rollout_ref.actor.fsdp_config.fsdp_size=0"], "fsdp_size=0"),
        (["trainer.strategy.class_path=my.Strategy"], "my.Strategy"),
    ],
)
def test_what_decides_and_cannot_be_read_is_named_and_never_passes(arguments: list[str], named: str) -> None:
    result = checked(*arguments)
    assert named in said(result, "unknown")
    assert (result.determined, result.exit_code) in ((False, 3), (False, 1))


def test_keys_of_no_framework_are_refused() -> None:
    for arguments in (["critic.model_name=x", "actor.model_name=y"], ["training.verl_config.actor=1"]):
        with pytest.raises(UsageError, match=arguments[0]):
            checked(*arguments)


# accelerate, the Trainer


def test_accelerate_reads_in_its_version_what_it_is_known_to_read() -> None:
    since = use_of(checked("accelerate_v1.yaml", version="1.7"), "model")
    assert ids(since) == ["fsdp1/policy/unstaged/full_state_dict.rank0+cpu", "fsdp1/policy/unstaged/sharded_state_dict"]
    launched = use_of(checked("accelerate_v1.yaml", "~fsdp_config.fsdp_use_orig_params", version="1.7"), "model")
    assert launched.scenario.strategy == "fsdp1-orig", "accelerate launch's default"
    v2 = use_of(checked("accelerate_v2.yaml", version="1.10"), "model")
    assert ids(v2)[-1] == "fsdp2/policy/unstaged/state_dict.to.full_tensor"
    assert "fsdp2/policy/unstaged/fresh/set_model_state_dict.broadcast" in loads(v2)


def test_keys_of_the_other_version_of_fsdp_are_a_conflict() -> None:
    (conflict,) = of_kind(checked("accelerate_v2.yaml", version="1.10"), "conflict")
    assert "fsdp_use_orig_params=true" in conflict.settings[0]
    assert not of_kind(checked("accelerate_v2.yaml", "~fsdp_config.fsdp_use_orig_params", version="1.10"), "conflict")
    reshard = checked("accelerate_v1.yaml", "fsdp_config.fsdp_reshard_after_forward=true", version="1.10")
    assert "reshard_after_forward" in said(reshard, "conflict")


def test_nccl_alone_with_shards_on_the_cpu_is_a_conflict() -> None:
    conflicts = of_kind(checked("accelerate_v2.yaml", version="1.6"), "conflict")
    assert any(any(row.startswith("backend=device-only") for row in finding.settings) for finding in conflicts)


def test_fsdp_config_without_fsdp_is_a_conflict_without_a_case() -> None:
    result = checked("accelerate_ddp.yaml", "fsdp_config.fsdp_offload_params=true")
    assert list_cases(result) == []
    assert any("fsdp_offload_params=true" in row for row in of_kind(result, "conflict")[0].settings)


@pytest.mark.parametrize(
    ("version", "checkpoint"),
    [
        ("4.56", "fsdp1-orig/policy/unstaged/device-only/full_state_dict.rank0+cpu"),
        ("5.9", "fsdp2/policy/unstaged/device-only/get_model_state_dict.sharded+cpu"),
        ("5.10", "fsdp2/policy/unstaged/device-only/get_model_state_dict.full+cpu"),
    ],
)
def test_the_trainer_offloads_by_policy_with_the_fsdp_of_its_transformers_version(
    version: str, checkpoint: str
) -> None:
    assert ids(use_of(checked("trainer.json", version=version), "model"))[-1] == checkpoint


def test_the_trainers_default_became_fsdp2() -> None:
    strategies = [use.scenario.strategy for use in checked("trainer.json", "~fsdp_config.fsdp_version").uses]
    assert strategies == ["fsdp1-orig", "fsdp2"]


def test_trl_syncs_fsdp1_by_summoning_and_a_backend_with_gloo_is_mixed() -> None:
    result = checked("trl.yaml", version="5.9")
    assert ids(use_of(result, "model"))[-1] == "fsdp1-orig/none/unstaged/summon_full_params"


def test_a_failing_engine_in_trls_async_grpo_is_a_known_hang() -> None:
    found = of_kind(checked("trainer.json", "weight_sync_steps=1", "fsdp_config.fsdp_version=2"), "known")
    (hang,) = [finding for finding in found if finding.entry == "consumer-leaves-the-others-in-a-gather"]
    assert all("/dies/" in case for case in hang.cases)
    assert hang.cases


def test_a_word_that_fsdp_does_not_have_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'ofload'"):
        checked("trainer.json", "fsdp=full_shard ofload")


def test_the_trainer_does_not_read_accelerates_name_of_the_offload() -> None:
    result = checked("fsdp=full_shard", "output_dir=out", "fsdp_config.offload_params=true", version="5.20")
    assert "offload_params" in said(result, "conflict")
    assert str(use_of(result, "model").scenario.offload) == "none"


def test_a_key_outside_accelerates_section_conflicts_only_in_its_file(
    tmp_path: pathlib.Path,
) -> None:
    file, script = tmp_path / "fsdp.yaml", tmp_path / "run.sh"
    file.write_text("distributed_type: FSDP\nfsdp_offload_params: true\nfsdp_config: {fsdp_version: 2}\n")
    assert "fsdp_offload_params" in said(check([str(file)]), "conflict")
    script.write_text("accelerate launch --use_fsdp --fsdp_version 2 train.py --fsdp_offload_params true\n")
    assert of_kind(check([str(script)]), "conflict") == []


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("fsdp_sync_module_states: false", True),
        ("fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: true", True),
        ("fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: false", False),
        ("fsdp_sync_module_states: true\n  fsdp_cpu_ram_efficient_loading: true", False),
        ("fsdp_cpu_ram_efficient_loading: true", False),
    ],
)
def test_a_load_on_one_rank_without_a_broadcast_is_a_conflict(
    tmp_path: pathlib.Path, settings: str, refused: bool
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  {settings}\n")
    assert bool(of_kind(check([str(file)]), "conflict")) == refused


def test_a_flag_of_accelerate_launch_overrides_its_file(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file nowhere.yaml --num_processes 2 train.py\n")
    result = check([str(script)])
    assert "nowhere.yaml" in said(result, "unknown")
    assert result.exit_code == 3
    beside = check([str(script), str(CONFIGS / "accelerate_v2.yaml")], framework_version="1.10")
    assert use_of(beside, "model").scenario.strategy == "fsdp2"
    assert beside.world_size == 2
    script.write_text("accelerate launch --use_fsdp --fsdp_version 2 --fsdp-offload-params true train.py\n")
    assert _scenarios(check([str(script)], framework_version="1.10")) == {"model": "fsdp2/policy/unstaged"}


def test_accelerates_mesh_with_replicas_is_hsdp() -> None:
    replicas = "parallelism_config.parallelism_config_dp_replicate_size=2"
    result = checked("distributed_type=FSDP", "fsdp_config.fsdp_version=2", replicas, version="1.10")
    assert use_of(result, "model").scenario.sharding == "hsdp"


# Others


def test_torchtitan_saves_only_where_it_is_asked_to_and_offloads_only_shards() -> None:
    assert use_of(checked("torchtitan.toml", "checkpoint.enable=false"), "model").extractions == ()
    result = checked("torchtitan.toml", "parallelism.data_parallel_shard_degree=1")
    (conflict,) = of_kind(result, "conflict")
    assert "enable_cpu_offload=true" in conflict.settings[0]
    assert list_cases(result) == []


@pytest.mark.parametrize(("mode", "known"), [("disabled", False), ("async", False), ("Async_with_pinned_mem", True)])
def test_torchtitans_mode_of_saving_decides_how_a_checkpoint_fails(mode: str, known: bool) -> None:
    result = checked("torchtitan.toml", f"checkpoint.async_mode={mode}", "training.enable_cpu_offload=false")
    cases = [case for finding in of_kind(result, "known") for case in finding.cases]
    assert any(case.endswith("dcp.async_save.pinned") for case in cases) is known


@pytest.mark.parametrize(
    ("arguments", "version", "offload"),
    [([], "0.6.0", "none"), ([], "0.7.0", "optimizer"), (["model.optim_cpu_offload=false"], "0.7.0", "none")],
)
def test_prime_rls_optimizer_is_offloaded_by_default_since_v0_7(
    arguments: list[str], version: str, offload: str
) -> None:
    result = checked("model.name=x", "model.dp_replicate=1", *arguments, version=version)
    assert str(use_of(result, "actor").scenario.offload) == offload


def test_lightnings_model_parallel_strategy_is_fsdp2_and_saves_as_its_arguments_say() -> None:
    section = "trainer.strategy"
    asked = [f"{section}.class_path=lightning.pytorch.strategies.ModelParallelStrategy", "trainer.devices=4"]
    (case,) = list_cases(checked(*asked))
    assert case.id == "fsdp2/none/unstaged/device-only/get_model_state_dict.sharded+cpu"
    whole = checked(*asked, f"{section}.init_args.save_distributed_checkpoint=false")
    assert [case.method for case in list_cases(whole)] == ["get_model_state_dict.full+cpu"]


# Versions


def _ranges() -> Iterator[tuple[str, Sequence[VersionRange]]]:
    """Ranges that together hold every version; those of verl by trainer, and by the workers that are chosen."""
    for kind in FRAMEWORKS:
        if kind is not Verl and kind.facts.versions:
            yield kind.facts.name, kind.facts.versions
    after, before = VersionRange(versions=">=0.8"), VersionRange(versions="<0.6")
    for trainer, implementation in (("ppo", "auto"), ("ppo", "disable"), ("sft", "auto"), ("old_sft", "auto")):
        ranges = [item for item in Verl.facts.versions if trainer in item.trainers]
        ranges = [item for item in ranges if not item.chosen_by or implementation in item.chosen_by]
        if implementation == "disable":
            ranges = [item for item in ranges if item.engine]
        if trainer == "sft" or implementation == "disable":
            ranges.append(before)
        yield f"verl, {trainer}, {implementation}", [*ranges, *([after] if trainer == "old_sft" else [])]


VERSIONS = ("0.0.1", "0.7.1", "0.8", "0.8.1.dev0", "0.9.0", "0.9.1", "0.12rc1", "1.6.9", "1.7", "4.57", "5.0", "5.9.1")


def test_every_version_is_in_exactly_one_range() -> None:
    for name, ranges in _ranges():
        for version in (*VERSIONS, "5.10.0.dev0", "6", "main", "latest"):
            assert len(select_matching(ranges, parse_version(version, ""))) == 1, (name, version)
        assert select_matching(ranges, None) == list(ranges)


def test_a_pre_release_is_what_it_leads_to() -> None:
    since = [VersionRange(versions=">=0.9")]
    versions = ("v0.9.0rc1", "0.9.0.dev3+g1234", "0.8.9")
    assert [select_matching(since, parse_version(version, "")) == since for version in versions] == [True, True, False]


@pytest.mark.parametrize("text", ["new", "", "0.7.x", "v", "1..2"])
def test_a_text_that_is_no_version_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--framework-version"):
        parse_version(text, "--framework-version")


def test_a_key_unknown_to_the_facts_of_a_framework_is_refused() -> None:
    with pytest.raises(ValidationError, match="`read_on`"):
        msgspec.convert({"name": "toy", "read_on": "1"}, FrameworkFacts[VersionRange, KeyTable])


# The interface of a framework


class _Toy(FsdpFramework[VersionRange]):
    """A framework with one model and one switch."""

    facts = FrameworkFacts(
        name="toy",
        read_in="1 to 3",
        section_keys="offload ranks",
        versions=(VersionRange(label="before 2", versions="<2"), VersionRange(label="since 2", versions=">=2")),
        models={"model": KeyTable(sections=("toy",), policy=("toy.offload",), path=("toy.ranks",))},
    )

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return bool(settings.list_below("toy"))

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        return settings.read_number("toy.ranks")

    def read(self, role: Role) -> ModelReading:
        return self.read_role(role)

    def choose_axes(self, role: Role, versions: VersionRange) -> dict[AxisName, Chosen]:
        return {"strategy": Chosen("fsdp2"), "offload": self.choose_offload(role, "the default").chosen}

    def list_extractions(self, role: Role, versions: VersionRange, scenario: Scenario) -> list[ExtractionPoint]:
        return [make_extraction_point("checkpoint", scenario, "state_dict")]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (*FRAMEWORKS, _Toy))


@pytest.mark.usefixtures("toy")
def test_a_framework_is_added_by_one_class() -> None:
    result = check(["toy.offload=true", "toy.ranks=3"])
    assert result.framework == "toy"
    assert [case.id for case in list_cases(result)] == ["fsdp2/policy/unstaged/state_dict"]
    assert [use.versions for use in result.uses] == [""], "ranges that do the same are one use"
    assert (result.world_size, result.models["model"].ranks) == (3, 3)
    assert set_ranks(result, 5).models["model"].ranks == 5


@pytest.mark.usefixtures("toy")
def test_a_key_that_a_framework_does_not_know_is_unknown() -> None:
    (finding,) = of_kind(check(["toy.offload=true", "toy.ofload=1"]), "unknown")
    assert finding.settings == ("toy.ofload=1 (command line)",)


@pytest.mark.usefixtures("toy")
def test_a_setting_that_cannot_be_read_leaves_its_model_undetermined() -> None:
    result = check(["toy.offload=${env}", "toy.ofload=1"])
    assert [(use.scenario, use.why_not) for use in result.uses] == [(None, "cannot be determined")]
    assert ["toy.offload=${env}" in said(result, "unknown"), len(result.findings)] == [True, 2]


# The number of ranks


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ([f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"], None, 8),
        ([f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"], 3, 3),
        (["engine.strategy=fsdp2"], None, None),
        (["distributed_type=FSDP", "num_processes=6"], None, 6),
        (["distributed_type=FSDP"], 2, 2),
        (["distributed_type=FSDP", "num_processes=-1"], None, None),
        (["trainer.strategy=fsdp", "trainer.devices='0,1'", "trainer.num_nodes=3"], None, 6),
        (["trainer.strategy=fsdp", "trainer.devices=-1", "trainer.num_nodes=3"], None, None),
        (["trainer.model.fsdp_cpu_offload=true", "trainer_gpu_ids=[2, 3]"], None, 2),
        (["base_model=small", "datasets=[]", "fsdp_version=2", "num_processes=4"], None, 4),
        (["base_model=small", "datasets=[]", "fsdp_version=2", "nproc_per_node=4", "nnodes=2"], None, 8),
        (["fsdp=full_shard", "output_dir=out"], None, None),
        (["training.enable_cpu_offload=true"], 4, 4),
    ],
)
def test_the_result_has_the_number_of_ranks_that_it_was_read_for(
    arguments: list[str], given: int | None, expected: int | None
) -> None:
    assert check(arguments, world_size=given).world_size == expected


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["distributed_type=FSDP", "num_processes=many"], "num_processes=many"),
        ([f"{ACTOR}.strategy=fsdp2", "trainer.nnodes=many"], "trainer.nnodes=many"),
    ],
)
def test_an_unreadable_number_of_ranks_is_named_and_other_settings_are_read(arguments: list[str], row: str) -> None:
    result = check(arguments)
    assert result.world_size is None
    assert list_cases(result)
    assert row in said(result, "unknown")
    assert check(arguments, world_size=2).world_size == 2


def test_a_key_that_a_version_does_not_read_cannot_stop_it() -> None:
    asked = ["fsdp=full_shard", "output_dir=out", "fsdp_config.state_dict_type=${oc.env:TYPE}"]
    assert list_cases(check(asked, framework_version="5.9"))
    assert not list_cases(check(asked, framework_version="5.10"))


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (
            ["actor.backend=fsdp:d4", "rollout.use_lora=true", "actor.use_lora=${rollout.use_lora}"],
            "qwen3-lora",
        ),
        (["actor.backend=fsdp:d4", "actor.use_lora=false", "actor.lora_rank=16"], "qwen3"),
        (["model.name=x", "model.dp_replicate=1", "model.optim_cpu_offload=false", "model.lora.r=1"], "qwen3-lora"),
    ],
)
def test_a_flag_or_a_table_asks_for_an_adapter(arguments: list[str], model: str) -> None:
    assert str(use_of(checked(*arguments), "actor").scenario.model) == model


# verl's older releases


def test_a_reference_model_is_built_before_v0_4_whatever_asks_for_it() -> None:
    asked = ["actor_rollout_ref.actor.strategy=fsdp", "algorithm.adv_estimator=grpo"]
    assert set(_scenarios(checked(*asked, version="0.2.0"))) == {"actor", "ref"}
    assert set(_scenarios(checked(*asked, version="0.4.0"))) == {"actor"}
    assert use_of(checked(*asked, version="0.2.0"), "actor").scenario.backend == "device-only"
    assert use_of(checked(*asked, version="0.3.0"), "actor").scenario.backend == "mixed"


def test_with_an_adapter_the_actor_is_the_reference() -> None:
    result = checked("verl_lora.sh", version="0.9.0")
    assert set(_scenarios(result)) == {"actor"}
    assert "ref_in_actor" in said(result, "note")
    without = checked("verl_lora.sh", "actor_rollout_ref.model.lora_rank=0", version="0.9.0")
    assert set(_scenarios(without)) == {"actor", "ref"}


def test_the_old_sft_trainer_gives_fsdp2_the_offload_of_fsdp1() -> None:
    before = checked("verl_sft_old.sh", "~model.strategy", version="0.3.0")
    since = checked("verl_sft_old.sh", "~model.strategy", version="0.4.0")
    assert _scenarios(before) == {"model": "fsdp1/policy/unstaged/device-only"}
    assert _scenarios(since) == {"model": "fsdp2/none/unstaged/device-only"}
    assert [len(of_kind(result, "conflict")) for result in (before, since)] == [0, 1]


@pytest.mark.parametrize(("version", "method"), [("0.4.0", "get_model_state_dict.full+cpu"), ("0.5.0", "state_dict")])
def test_the_old_sft_trainer_saves_shards_instead_of_models_since_v0_5(version: str, method: str) -> None:
    result = checked("model.partial_pretrain=x", "model.strategy=fsdp2", version=version)
    assert cases_of_roles(result)["model"] == [f"fsdp2/none/unstaged/device-only/{method}"]


def test_a_version_that_lacks_the_requested_features_never_passes() -> None:
    result = checked("verl_grpo.yaml", version="0.2.0")
    assert (list_cases(result), result.determined) == ([], False)
    assert result.exit_code == 3


def test_fsdp1_syncs_whole_tensors_where_the_rollout_loads_hf_weights() -> None:
    asked = ["actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.rollout.load_format=dummy_hf"]
    roles = cases_of_roles(checked(*asked, "trainer.use_legacy_worker_impl=enable", version="0.5.0"))
    assert roles["actor"] == ["fsdp1/none/unstaged/full_state_dict"]


def test_releases_that_cannot_read_a_file_are_ignored_without_a_given_version() -> None:
    asked = ("base_model=x", "micro_batch_size=1", "fsdp_version=2", "fsdp_config.reshard_after_forward=true")
    assert checked(*asked).exit_code == 0
    assert checked(*asked, version="0.8").exit_code == 1


@pytest.mark.parametrize(
    ("allocation", "code"),
    [
        ("sglang:d4+fsdp:d4", 0),
        ("sglang.d4p1t1+d4p1t1", 0),
        ("sglang:d2t4+megatron:(attn:d2p1t4|ffn:d1p1e8)", 3),
        ("sglang:d2t4+torchtitan:d4", 3),
    ],
)
def test_the_allocation_says_which_engine_of_areal_trains(allocation: str, code: int) -> None:
    result = checked(f"allocation_mode={allocation}", "actor.path=x")
    assert (result.exit_code, result.under_fsdp) == (code, code == 0)
