"""`fsdp-doctor check` reads a configuration of verl as verl would."""

from __future__ import annotations

import json
import pathlib

import pytest
from support.checked import ACTOR, FSDP2, checked, flag, ids, loads, of_kind, said, use_of

from fsdp_doctor.check import check, list_cases
from fsdp_doctor.known import catalogue


@pytest.fixture
def no_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: ())


def test_issue_5995_is_staged_before_v0_8_and_not_since() -> None:
    before = checked("verl_policy.sh", version="0.7.1")
    assert ids(use_of(before, "actor")) == ["fsdp2/policy/staged/state_dict.to.full_tensor"]
    entries = [catalogue.find_entry(finding.entry) for finding in of_kind(before, "known")]
    assert any("verl-project/verl#5995" in entry.references for entry in entries)
    assert before.exit_code == 1
    since = checked("verl_policy.sh", version="0.9.0")
    assert ids(use_of(since, "actor")) == ["fsdp2/policy/unstaged/state_dict.to.full_tensor"]
    assert since.exit_code == 0


def test_without_a_version_both_are_uses() -> None:
    uses = [use for use in checked("verl_policy.sh").uses if use.role == "actor"]
    assert [(use.versions.split(",")[0], ids(use)) for use in uses] == [
        ("v0.6 and v0.7", ["fsdp2/policy/staged/state_dict.to.full_tensor"]),
        ("v0.8; v0.9.0; after v0.9.0", ["fsdp2/policy/unstaged/state_dict.to.full_tensor"]),
    ]


@pytest.mark.usefixtures("no_catalogue")
@pytest.mark.parametrize(
    ("arguments", "version", "expected"),
    [
        ([flag("param_offload")], "0.9.0", "fsdp1/param/staged/nonblocking/sharded_state_dict.full_tensor"),
        ([flag("use_orig_params")], "0.9.0", "fsdp1-orig/none/staged/sharded_state_dict.full_tensor"),
        ([FSDP2, flag("param_offload")], "0.8.0", "fsdp2/param/staged/state_dict.held"),
        ([FSDP2, flag("param_offload")], "0.9.0", "fsdp2/param/unstaged/state_dict.to.full_tensor"),
        ([FSDP2, flag("param_offload")], "0.9.1", "fsdp2/param/unstaged/nonblocking/state_dict.to.full_tensor"),
        ([FSDP2, flag("param_offload")], "main", "fsdp2/param/unstaged/nonblocking/state_dict.to.full_tensor"),
        ([FSDP2, flag("optimizer_offload")], "0.9.0", "fsdp2/optimizer/unstaged/nonblocking/state_dict.to.full_tensor"),
        ([FSDP2, flag("fsdp_size", "2")], "0.9.0", "fsdp2/none/unstaged/hsdp/state_dict.to.full_tensor"),
        ([FSDP2, flag("fsdp_size", "1")], "0.9.0", "fsdp2/none/unstaged/size1/state_dict.to.full_tensor"),
        ([FSDP2, flag("fsdp_size", "8")], "0.9.0", "fsdp2/none/unstaged/state_dict.to.full_tensor"),
        ([FSDP2, "actor_rollout_ref.model.lora_rank=32"], "0.9.0", "fsdp2/none/staged/qwen3-lora/lora.adapter"),
        (
            [FSDP2, "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora.merge=true"],
            "0.8.0",
            "fsdp2/none/staged/qwen3-lora/lora.merged.read_late",
        ),
        (
            [FSDP2, "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora.merge=true"],
            "0.9.0",
            "fsdp2/none/staged/qwen3-lora/lora.merged",
        ),
    ],
)
def test_the_sync_of_the_actor_is_the_case_that_its_version_runs(
    arguments: list[str], version: str, expected: str
) -> None:
    result = checked(f"{ACTOR}.grad_clip=1.0", *arguments, version=version)
    assert ids(use_of(result, "actor")) == [expected]


def test_verl_takes_a_checkpoint_only_where_it_saves() -> None:
    asked = (FSDP2, flag("offload_policy"))
    assert len(use_of(checked(*asked, version="0.8.0"), "actor").extractions) == 1
    saving = (*asked, "trainer.save_freq=5", f"{ACTOR}.checkpoint.save_contents=[model,hf_model]")
    for version, staging in (("0.8.0", "staged"), ("0.9.0", "unstaged")):
        _, *checkpoints = ids(use_of(checked(*saving, version=version), "actor"))
        assert checkpoints == [
            f"fsdp2/policy/{staging}/state_dict",
            f"fsdp2/policy/{staging}/get_model_state_dict.full+cpu",
        ]


@pytest.mark.parametrize(("version", "file"), [("0.9.0", "verl_grpo.yaml"), (None, "verl_grpo.yaml")])
def test_actor_ref_and_critic_have_their_settings(version: str | None, file: str) -> None:
    result = checked(file, version=version)
    scenarios = {use.role: use.scenario for use in result.uses}
    assert {role: (scenario.strategy, str(scenario.offload)) for role, scenario in scenarios.items()} == {
        "actor": ("fsdp2", "policy+param+optimizer"),
        "ref": ("fsdp2", "policy"),
        "critic": ("fsdp1", "param"),
    }
    assert use_of(result, "ref").extractions == ()


def test_the_critic_of_the_old_layout_is_read_and_had_nccl_alone() -> None:
    old = "critic.model.fsdp_config"
    asked = ("critic.strategy=fsdp2", flag("offload_policy", section=old), "trainer.use_legacy_worker_impl=enable")
    result = checked(*asked, "algorithm.adv_estimator=gae", "trainer.save_freq=1", version="0.7.1")
    assert ids(use_of(result, "critic")) == ["fsdp2/policy/unstaged/device-only/state_dict"]
    assert any(any("device-only" in row for row in finding.settings) for finding in of_kind(result, "conflict"))


def test_models_that_are_not_built_are_not_checked() -> None:
    result = checked("verl_grpo.yaml", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=false", version="0.9.0")
    assert [use.role for use in result.uses] == ["actor"]
    assert len(of_kind(result, "note")) >= 2


def test_policy_and_manual_offload_is_a_conflict_that_the_policy_wins() -> None:
    result = checked(FSDP2, flag("offload_policy"), flag("param_offload"), version="0.9.0")
    (conflict,) = of_kind(result, "conflict")
    assert conflict.settings == (
        f"{ACTOR}.fsdp_config.offload_policy=true (command line)",
        f"{ACTOR}.fsdp_config.param_offload=true (command line)",
    )
    assert not of_kind(checked(FSDP2, flag("offload_policy"), version="0.9.0"), "conflict")


def test_a_policy_is_ignored_under_fsdp1_and_its_case_has_none() -> None:
    result = checked(flag("offload_policy"), flag("param_offload"), version="0.9.0")
    assert f"{ACTOR}.fsdp_config.offload_policy=true (command line)" in of_kind(result, "conflict")[0].settings
    assert str(use_of(result, "actor").scenario.offload) == "param"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((flag("fsdp_size", "1"), flag("model_dtype", "bf16")), True),
        (("trainer.n_gpus_per_node=1", flag("model_dtype", "bfloat16")), True),
        ((flag("fsdp_size", "1"), flag("mixed_precision.param_dtype", "fp32")), True),
        ((flag("fsdp_size", "1"),), False),
        ((flag("fsdp_size", "2"), flag("model_dtype", "bf16")), False),
        ((flag("fsdp_size", "1"), flag("model_dtype", "bf16"), flag("use_orig_params")), True),
        ((flag("fsdp_size", "1"), flag("model_dtype", "bf16"), FSDP2), False),
    ],
)
def test_a_manual_offload_of_unsharded_fsdp1_in_its_compute_dtype_frees_nothing(
    arguments: tuple[str, ...], expected: bool
) -> None:
    entry = "fsdp1-no-shard-offload-frees-nothing"
    findings = [f for f in checked(flag("param_offload"), *arguments, version="0.9.0").findings if f.entry == entry]
    assert bool(findings) == expected
    assert not expected or f"{ACTOR}.fsdp_config.param_offload=true (command line)" in findings[0].settings
    assert not [finding for finding in checked(*arguments, version="0.9.0").findings if finding.entry == entry]


def test_a_shard_group_of_size_zero_is_refused() -> None:
    result = checked(flag("fsdp_size", "0"), version="0.9.0")
    assert "fsdp_size=0 (command line)" in said(result, "unknown")
    assert result.exit_code == 3


def test_two_different_strategies_are_a_conflict() -> None:
    (conflict,) = of_kind(checked(FSDP2, flag("strategy", "fsdp"), version="0.9.0"), "conflict")
    assert [row.partition(" ")[0] for row in conflict.settings] == [FSDP2, flag("strategy", "fsdp")]
    assert not of_kind(checked(FSDP2, flag("strategy", "fsdp2"), version="0.9.0"), "conflict")
    (note,) = of_kind(checked(FSDP2, "trainer.use_legacy_worker_impl=disable", version="0.7.1"), "note")
    assert note.settings == (f"{FSDP2} (command line)",)
    assert not of_kind(checked(FSDP2, version="0.8.0"), "note")


@pytest.mark.parametrize(
    "choice",
    [
        ("engine=automodel", "engine.distributed_strategy=fsdp2"),
        ("engine=veomni", "engine.dtype=bfloat16"),
        ("engine=fsdp3", "engine.dtype=bfloat16"),
        ("engine.strategy=fsdp_turbo",),
        ("engine.strategy=fsdp3",),
        ("engine.strategy=fsdp2", "engine.ofload_policy=true"),
    ],
    ids=" ".join,
)
def test_an_unknown_engine_strategy_or_key_is_no_default(choice: tuple[str, ...]) -> None:
    result = checked(*choice, "trainer.n_gpus_per_node=8", "engine.fsdp_size=-1")
    assert (result.framework, result.exit_code) == ("verl", 3)
    assert of_kind(result, "unknown")


def test_a_config_group_chosen_by_hydra_survives_overrides_within_the_group() -> None:
    result = checked("engine=megatron", "engine.dtype=bfloat16", "engine.strategy=megatron")
    assert [use.why_not for use in result.uses] == ["not under FSDP: engine=megatron (command line)"]


def test_an_unreadable_size_does_not_hide_findings_that_hold_for_every_size() -> None:
    result = checked("verl_policy.sh", flag("fsdp_size", "${SIZE}"), version="0.7.1")
    entries = [catalogue.find_entry(finding.entry) for finding in of_kind(result, "known")]
    assert any("verl-project/verl#5995" in entry.references for entry in entries)
    assert "fsdp_size=${SIZE}" in "".join(row for one in of_kind(result, "unknown") for row in one.settings)
    assert result.exit_code == 1
    assert checked("verl_policy.sh", flag("fsdp_size", "${SIZE}"), version="0.9.0").exit_code == 3


def test_another_engine_has_no_case() -> None:
    result = checked(f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.param_offload=true")
    assert use_of(result, "actor").why_not == f"not under FSDP: {ACTOR}.strategy=megatron (command line)"
    assert list_cases(result) == []
    assert result.findings == ()


def test_an_unknown_or_misplaced_key_is_named_with_its_neighbours() -> None:
    sentence = said(checked("verl_fsdp1.yaml"), "unknown")
    assert "'offload_polcy'" in sentence
    assert "offload_policy" in sentence
    result = checked(f"{ACTOR}.offload_policy=true")
    assert f"{ACTOR}.fsdp_config.offload_policy" in said(result, "unknown")


# Dimensions


def _model(directory: pathlib.Path, **sizes: object) -> str:
    config = {"model_type": "qwen3", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (directory / "config.json").write_text(json.dumps({**config, **heads, **sizes}))
    return f"actor_rollout_ref.model.path={directory}"


def test_nonblocking_offload_with_uneven_shards_is_a_conflict_at_that_world_size(tmp_path: pathlib.Path) -> None:
    asked = (FSDP2, flag("param_offload"), _model(tmp_path, vocab_size=1025))
    result = checked(*asked, version="main")
    (conflict,) = of_kind(result, "conflict")
    assert "vocab_size=1025" in conflict.sentence
    assert ids(use_of(result, "actor")) == ["fsdp2/param/unstaged/uneven/nonblocking/state_dict.to.full_tensor"]
    assert list(conflict.cases) == ids(use_of(result, "actor"))
    even = checked(*asked, flag("fsdp_size", "1"), version="main")
    assert not of_kind(even, "conflict")
    halves = (*asked[:2], _model(tmp_path, vocab_size=1026))
    assert of_kind(checked(*halves, version="main"), "conflict")
    assert not of_kind(checked(*halves, flag("fsdp_size", "2"), version="main"), "conflict")
    assert not of_kind(checked(*asked, version="0.9.0"), "conflict"), "it waited for its copies then"


def test_a_world_size_of_the_command_line_goes_before_the_configurations(tmp_path: pathlib.Path) -> None:
    asked = (FSDP2, flag("param_offload"), _model(tmp_path), "trainer.n_gpus_per_node=8")
    assert not of_kind(checked(*asked, version="main"), "conflict")
    sizes = said(checked(*asked, version="main", world=3), "conflict")
    assert "vocab_size=1024, hidden_size=64, intermediate_size=128" in sizes
    assert "num_key_value_heads * head_dim=32" in sizes


def test_a_model_elsewhere_cannot_be_known_and_is_said_once() -> None:
    result = checked(
        *(FSDP2, flag("param_offload"), "actor_rollout_ref.model.path=Qwen/Qwen3-4B", "critic.strategy=fsdp2"),
        *(flag("param_offload", section="critic.fsdp"), "critic.model.path=Qwen/Qwen3-4B"),
        version="main",
    )
    notes = [row for note in of_kind(result, "note") for row in note.settings if "Qwen/Qwen3-4B" in row]
    assert len(notes) == 2, "one for each model path"
    assert not of_kind(checked(FSDP2, version="main"), "note")


def test_the_model_of_the_matrix_is_the_one_that_its_directory_names(tmp_path: pathlib.Path) -> None:
    moe = checked(FSDP2, _model(tmp_path, model_type="qwen3_moe", num_experts=8), version="0.9.0")
    assert use_of(moe, "actor").scenario.model == "qwen3-moe"
    tied = checked(FSDP2, _model(tmp_path, tie_word_embeddings=True), version="0.9.0")
    assert use_of(tied, "actor").scenario.model == "qwen3-tied"
    other = checked(FSDP2, _model(tmp_path, model_type="llama"), version="0.9.0")
    assert use_of(other, "actor").scenario.model == "qwen3"
    assert "'llama'" in said(other, "note")


@pytest.mark.parametrize(
    ("module", "foreign"),
    [("verl.trainer.main_ppo", False), ("recipe.dapo.main_dapo", False), ("myrl.trainer.main_ppo", True)],
)
def test_a_package_that_is_not_verls_is_noted(tmp_path: pathlib.Path, module: str, foreign: bool) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m {module} actor_rollout_ref.actor.strategy=fsdp2\n")
    result = check([str(script)], framework_version="0.9.0")
    assert ("myrl" in said(result, "note")) == foreign


# Checkpoints that are loaded


def test_a_resume_loads_rank_files_and_is_staged_under_param_offload() -> None:
    others = (flag("offload_policy", "false"), flag("optimizer_offload", "false"))
    asked = ("trainer.save_freq=10", FSDP2, flag("param_offload"), *others)
    result = checked("verl_grpo.yaml", *asked, version="0.9.0")
    assert loads(use_of(result, "actor")) == ["fsdp2/param/staged/fresh/rank_files.model+optimizer"]


def test_nothing_is_resumed_where_nothing_is_saved() -> None:
    result = checked("verl_grpo.yaml", "trainer.save_freq=-1", version="0.9.0")
    assert loads(use_of(result, "actor")) == []
