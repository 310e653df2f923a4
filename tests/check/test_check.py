"""`fsdp-doctor check` reads a configuration as its framework would, and says no more than it has read."""

from __future__ import annotations

import io
import json
import pathlib
import re
import sys

import pytest
from support.inside import doctor

from fsdp_doctor.check import CheckResult, cases, check, presentation, reading
from fsdp_doctor.check.config_findings import ConfigFinding
from fsdp_doctor.check.use import Use
from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.failures import KnownFailure, Trigger
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.paths import PATH_NAMES, paths_for

CONFIGS = pathlib.Path(__file__).with_name("configs")
GOOD = (
    *("verl_grpo.yaml", "verl_issue.md", "verl_fsdp1.yaml", "verl_sft.yaml", "accelerate_v1.yaml"),
    *("accelerate_v2.yaml", "trainer.json", "trl.yaml", "torchtitan.toml"),
)
ACTOR = "actor_rollout_ref.actor"
FSDP2 = f"{ACTOR}.strategy=fsdp2"


@pytest.fixture
def no_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "known_failures", lambda: ())


def checked(*arguments: str, version: str | None = None, world: int | None = None) -> CheckResult:
    named = [str(CONFIGS / argument) if (CONFIGS / argument).is_file() else argument for argument in arguments]
    return check(named, framework_version=version, world_size=world)


def flag(name: str, value: str = "true", section: str = f"{ACTOR}.fsdp_config") -> str:
    return f"{section}.{name}={value}"


def use_of(result: CheckResult, role: str) -> Use:
    (found,) = [use for use in result.uses if use.role == role]
    return found


def ids(use: Use) -> list[str]:
    return [case.id for case in use.cases]


def of_kind(result: CheckResult, kind: str) -> list[ConfigFinding]:
    return [finding for finding in result.findings if finding.kind == kind]


def said(result: CheckResult, kind: str) -> str:
    return "\n".join(finding.sentence for finding in of_kind(result, kind))


def entry(name: str, **trigger: tuple[str, ...]) -> KnownFailure:
    return KnownFailure(
        id=name,
        group="a",
        title="it breaks",
        verdict="crash",
        cause="a cause",
        remedy="a remedy",
        evidence="reported",
        references=("a/b#1",),
        triggers=(Trigger(trigger),),
    )


# Reading


@pytest.mark.parametrize("file", GOOD)
def test_every_case_that_is_named_can_be_given_to_probe(file: str) -> None:
    found = cases(checked(file))
    assert found
    for case in found:
        assert parse_case_id(case.id, PATH_NAMES) == case
        assert case.path in {path.name for path in paths_for(case.scenario)}


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("broken.yaml", "broken.yaml:4: invalid YAML: expected ',' or ']'"),
        ("broken.toml", "broken.toml:3: invalid TOML: Invalid value"),
        ("broken.json", "broken.json:2: invalid JSON: Expecting value"),
        ("binary.yaml", "is not a text file in UTF-8"),
        ("empty.yaml", "is empty"),
        ("deepspeed.yaml", "not a configuration of a supported framework; these are supported"),
        ("accelerate_v3.yaml", "accelerate_v3.yaml:4): the version of FSDP in fsdp_config must be 1 or 2"),
        ("nosuch.yaml", "cannot read nosuch.yaml: No such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_with_its_line(file: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)) as raised:
        checked(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "a: &a\n  b: *a\n"),
        (".yaml", "- a\n- b\n"),
        (".yaml", "a: !!python/object:os.system x\n"),
        (".yaml", "a: 2026-99-99\n"),
        (".yaml", "a: \x07\n"),
        (".yaml", "a: " + "[" * 5000 + "\n"),
        (".json", "[" * 100_000),
        (".json", "[1, 2]"),
        (".json", '{"a": ' + "1" * 5000 + "}"),
        (".toml", "a = " + "[" * 100_000),
        (".txt", "there is nothing here: at all\nor is there\n"),
        (
            ".yaml",
            "a0: &a0 {b: 1, c: 2}\n" + "".join(f"a{i + 1}: &a{i + 1} {{b: *a{i}, c: *a{i}}}\n" for i in range(40)),
        ),
    ],
)
def test_hostile_text_is_a_usage_error(suffix: str, text: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text(text)
    with pytest.raises(UsageError):
        check([str(file)])


def test_a_pasted_report_gives_its_overrides_with_their_lines() -> None:
    settings = reading.read([str(CONFIGS / "verl_issue.md")])
    found = {row.key: (row.value, row.where.rpartition(":")[2]) for row in settings}
    assert found[f"{ACTOR}.fsdp_config.offload_policy"] == (True, "18")  # from the variable offload
    assert found[f"{ACTOR}.strategy"] == ("fsdp2", "16")  # quoted; not the line that is commented out
    assert found["actor_rollout_ref.model.path"] == ("Qwen/Qwen3-4B", "15")  # a variable's own default
    assert found[f"{ACTOR}.fsdp_config.fsdp_size"] == (-1, "19")  # ++
    assert found["trainer.use_legacy_worker_impl"] == ("disable", "22")  # +
    assert found["data.train_files"] == (["gsm8k/train.parquet"], "14")


def test_two_quoted_overrides_on_a_line_are_two_settings(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python main.py 'a.b=True' \"c.d=[x, y]\" `e.f=1`, and g.h=2.\n")
    rows = {row.key: row.value for row in reading.read([str(file)])}
    assert rows == {"a.b": True, "c.d": ["x", "y"], "e.f": 1, "g.h": 2}


def test_the_standard_input_may_be_a_whole_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (CONFIGS / "verl_fsdp1.yaml").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    result = check(["-"])
    assert use_of(result, "actor").scenario is not None
    assert "standard input:3" in presentation.as_text(result)


def test_a_fenced_block_of_a_report_is_read_in_its_own_format_and_keeps_its_lines(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.md"
    file.write_text("It hangs with:\n\n```yaml\nfsdp_config:\n  fsdp_version: 2\n```\n\nSee: above.\n")
    assert [str(row) for row in reading.read([str(file)])] == [f"fsdp_config.fsdp_version=2 ({file}:5)"]
    assert use_of(check([str(file)], framework_version="1.7"), "model").scenario.strategy == "fsdp2"


def test_an_override_replaces_a_file_wherever_it_stands_and_a_tilde_takes_away() -> None:
    key = f"{ACTOR}.fsdp_config.offload_policy"
    for order in (("verl_issue.md", f"{key}=false"), (f"{key}=false", "verl_issue.md"), ("verl_issue.md", f"~{key}")):
        scenario = use_of(checked(*order, version="0.9.0"), "actor").scenario
        assert scenario is not None
        assert scenario.offload == "none"


def test_a_section_that_is_replaced_as_a_whole_loses_what_was_in_it() -> None:
    result = checked("verl_issue.md", f"{ACTOR}.fsdp_config=null", version="0.9.0")
    assert use_of(result, "actor").scenario.offload == "none"


def test_a_later_file_replaces_an_earlier_one(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "later.yaml"
    file.write_text("actor_rollout_ref: {actor: {strategy: fsdp}}\n")
    result = checked("verl_grpo.yaml", str(file), version="0.9.0")
    assert use_of(result, "actor").scenario.strategy == "fsdp1"


def test_an_interpolation_is_followed_inside_the_file_and_otherwise_said() -> None:
    followed = use_of(checked("verl_grpo.yaml", version="0.9.0"), "ref")
    assert followed.scenario.strategy == "fsdp2"
    result = checked(FSDP2, flag("offload_policy", "${oc.env:OFFLOAD}"))
    assert use_of(result, "actor").scenario is None
    assert "${oc.env:OFFLOAD} (command line) is neither true nor false" in said(result, "unknown")
    assert cases(result) == []


def test_what_decides_which_models_there_are_must_be_readable() -> None:
    with pytest.raises(UsageError, match=r"use_kl_in_reward=.* is neither true nor false"):
        checked("algorithm.use_kl_in_reward=${oc.env:KL}", FSDP2)


def test_a_reference_to_itself_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="refers to itself"):
        checked("actor_rollout_ref.actor.strategy=${a.b}", "a.b=${a.b}")


# verl


def test_issue_5995_is_staged_before_v0_8_and_not_since() -> None:
    before = checked("verl_issue.md", version="0.7.1")
    assert ids(use_of(before, "actor")) == ["fsdp2/policy/staged/state_dict.to.full_tensor"]
    known = [one for one in of_kind(before, "known") if "verl-project/verl#5995" in presentation.as_text(before)]
    assert known
    assert before.exit_code == 1
    since = checked("verl_issue.md", version="0.9.0")
    assert ids(use_of(since, "actor")) == ["fsdp2/policy/unstaged/state_dict.to.full_tensor"]
    assert since.exit_code == 0


def test_without_a_version_both_are_said() -> None:
    uses = [use for use in checked("verl_issue.md").uses if use.role == "actor"]
    assert [(use.versions.split(",")[0], ids(use)) for use in uses] == [
        ("before v0.8.0", ["fsdp2/policy/staged/state_dict.to.full_tensor"]),
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


def test_a_checkpoint_is_taken_only_where_verl_saves_and_was_staged_under_the_policy_in_v0_8() -> None:
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
def test_actor_ref_and_critic_are_told_apart(version: str | None, file: str) -> None:
    result = checked(file, version=version)
    scenarios = {use.role: use.scenario for use in result.uses}
    assert {role: (found.strategy, found.offload) for role, found in scenarios.items()} == {
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
    assert "has only the accelerator's backend" in said(result, "conflict")


def test_models_that_are_not_built_are_not_checked() -> None:
    result = checked("verl_grpo.yaml", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=false", version="0.9.0")
    assert [use.role for use in result.uses] == ["actor"]
    assert "no critic is built" in said(result, "note")
    assert "no reference model is built" in said(result, "note")


def test_policy_and_manual_offload_is_a_conflict_that_the_policy_wins() -> None:
    result = checked(FSDP2, flag("offload_policy"), flag("param_offload"), version="0.9.0")
    (found,) = of_kind(result, "conflict")
    assert "the policy takes precedence" in found.sentence
    assert found.settings == (
        f"{ACTOR}.fsdp_config.offload_policy=true (command line)",
        f"{ACTOR}.fsdp_config.param_offload=true (command line)",
    )
    assert not of_kind(checked(FSDP2, flag("offload_policy"), version="0.9.0"), "conflict")


def test_a_policy_is_ignored_under_fsdp1_and_its_case_has_none() -> None:
    result = checked(flag("offload_policy"), flag("param_offload"), version="0.9.0")
    assert "offload_policy has no effect with FSDP1" in said(result, "conflict")
    assert use_of(result, "actor").scenario.offload == "param"


def test_two_strategies_that_differ_are_a_conflict_and_an_engine_that_follows_its_own_is_said() -> None:
    assert "two different strategies" in said(checked(FSDP2, flag("strategy", "fsdp"), version="0.9.0"), "conflict")
    assert not of_kind(checked(FSDP2, flag("strategy", "fsdp2"), version="0.9.0"), "conflict")
    assert "uses FSDP1 unless fsdp_config.strategy is set" in said(checked(FSDP2, version="0.7.1"), "note")
    assert not of_kind(checked(FSDP2, version="0.8.0"), "note")


def test_another_engine_has_no_case_and_says_so() -> None:
    result = checked(f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.param_offload=true")
    assert use_of(result, "actor").why_not == f"not under FSDP: {ACTOR}.strategy=megatron (command line)"
    assert cases(result) == []
    assert result.findings == ()


def test_an_unknown_key_is_said_with_its_neighbours_and_so_is_one_in_the_wrong_place() -> None:
    sentence = said(checked("verl_fsdp1.yaml"), "unknown")
    assert f"'offload_polcy' is not a known key of {ACTOR}.fsdp_config" in sentence
    assert "offload_policy" in sentence
    result = checked(f"{ACTOR}.offload_policy=true")
    near = f"(did you mean {ACTOR}.fsdp_config.offload_policy?)"
    assert f"does not read offload_policy in {ACTOR} {near}" in said(result, "unknown")


# Dimensions


def _model(directory: pathlib.Path, **sizes: object) -> str:
    config = {"model_type": "qwen3", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (directory / "config.json").write_text(json.dumps({**config, **heads, **sizes}))
    return f"actor_rollout_ref.model.path={directory}"


def test_nonblocking_offload_with_uneven_shards_is_a_conflict_at_that_world_size(tmp_path: pathlib.Path) -> None:
    asked = (FSDP2, flag("param_offload"), _model(tmp_path, vocab_size=1025))
    result = checked(*asked, version="main")
    (found,) = of_kind(result, "conflict")
    assert "vocab_size=1025 cannot be divided evenly among the 8 ranks" in found.sentence
    assert ids(use_of(result, "actor")) == ["fsdp2/param/unstaged/uneven/nonblocking/state_dict.to.full_tensor"]
    assert list(found.cases) == ids(use_of(result, "actor"))
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
    notes = [one for one in of_kind(result, "note") if "the model is not a local directory" in one.sentence]
    assert len(notes) == 2, "one for each model path"
    assert not [one for one in checked(FSDP2, version="main").findings if "directory" in one.sentence]


def test_the_model_of_the_matrix_is_the_one_that_its_directory_names(tmp_path: pathlib.Path) -> None:
    moe = checked(FSDP2, _model(tmp_path, model_type="qwen3_moe", num_experts=8), version="0.9.0")
    assert use_of(moe, "actor").scenario.model == "qwen3-moe"
    tied = checked(FSDP2, _model(tmp_path, tie_word_embeddings=True), version="0.9.0")
    assert use_of(tied, "actor").scenario.model == "qwen3-tied"
    other = checked(FSDP2, _model(tmp_path, model_type="llama"), version="0.9.0")
    assert use_of(other, "actor").scenario.model == "qwen3"
    assert "no model of type 'llama'" in said(other, "note")


# The others


def test_accelerate_version_1_is_fsdp1_with_the_backend_of_its_version() -> None:
    before = use_of(checked("accelerate_v1.yaml", version="1.6.0"), "model")
    since = use_of(checked("accelerate_v1.yaml", version="1.7"), "model")
    assert [use.scenario.id for use in (before, since)] == [
        "fsdp1/policy/unstaged/device-only",
        "fsdp1/policy/unstaged",
    ]
    assert ids(since) == ["fsdp1/policy/unstaged/full_state_dict.rank0+cpu", "fsdp1/policy/unstaged/sharded_state_dict"]
    launched = use_of(checked("accelerate_v1.yaml", "~fsdp_config.fsdp_use_orig_params", version="1.7"), "model")
    assert launched.scenario.strategy == "fsdp1-orig", "accelerate launch's default"


def test_accelerate_version_2_with_keys_of_version_1_is_a_conflict() -> None:
    result = checked("accelerate_v2.yaml", version="1.10")
    (found,) = of_kind(result, "conflict")
    assert "fsdp_use_orig_params=true" in found.settings[0]
    assert ids(use_of(result, "model"))[-1] == "fsdp2/policy/unstaged/state_dict.to.full_tensor"
    assert not of_kind(checked("accelerate_v2.yaml", "~fsdp_config.fsdp_use_orig_params", version="1.10"), "conflict")
    keys = said(
        checked("accelerate_v1.yaml", "fsdp_config.fsdp_reshard_after_forward=true", version="1.10"), "conflict"
    )
    assert "reshard_after_forward belongs to fsdp_version 2" in keys


def test_accelerate_before_gloo_is_nccl_alone_with_cpu_shards() -> None:
    assert "has only the accelerator's backend" in said(checked("accelerate_v2.yaml", version="1.6"), "conflict")


def test_accelerate_without_fsdp_has_no_case() -> None:
    result = checked("accelerate_ddp.yaml", "fsdp_config.fsdp_offload_params=true")
    assert cases(result) == []
    assert "only with distributed_type=FSDP" in said(result, "conflict")


@pytest.mark.parametrize(
    ("version", "checkpoint"),
    [
        ("4.56", "fsdp1-orig/policy/unstaged/device-only/full_state_dict.rank0+cpu"),
        ("5.9", "fsdp2/policy/unstaged/device-only/get_model_state_dict.sharded+cpu"),
        ("5.10", "fsdp2/policy/unstaged/device-only/get_model_state_dict.full+cpu"),
    ],
)
def test_the_trainers_offload_is_a_policy_and_its_fsdp_is_that_of_transformers_version(
    version: str, checkpoint: str
) -> None:
    assert ids(use_of(checked("trainer.json", version=version), "model"))[-1] == checkpoint


def test_the_trainers_default_became_fsdp2() -> None:
    strategies = [use.scenario.strategy for use in checked("trainer.json", "~fsdp_config.fsdp_version").uses]
    assert strategies == ["fsdp1-orig", "fsdp2"]


def test_trl_syncs_fsdp1_by_summoning_and_a_backend_with_gloo_is_mixed() -> None:
    result = checked("trl.yaml", version="5.9")
    assert ids(use_of(result, "model"))[-1] == "fsdp1-orig/none/unstaged/summon_full_params"


def test_a_word_that_fsdp_does_not_have_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'ofload' is not an option of fsdp; the options are full_shard"):
        checked("trainer.json", "fsdp=full_shard ofload")


def test_torchtitans_offload_is_a_policy_with_gloo_beside() -> None:
    result = checked("torchtitan.toml")
    assert use_of(result, "model").scenario.id == "fsdp2/policy/unstaged/hsdp"
    assert "no other parallelism" in said(result, "note")
    assert use_of(checked("torchtitan.toml", "checkpoint.enable=false"), "model").extractions == ()


def test_torchtitan_without_shards_ignores_the_offload() -> None:
    result = checked("torchtitan.toml", "parallelism.data_parallel_shard_degree=1")
    assert "enable_cpu_offload is a setting of FSDP" in said(result, "conflict")
    assert cases(result) == []


# Findings and reports


def test_what_the_catalogue_knows_of_a_case_is_one_finding_with_all_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (entry("first", offload=("policy*",), staging=("staged",)), entry("never", strategy=("fsdp1-orig",)))
    monkeypatch.setattr(catalogue, "known_failures", lambda: entries)
    asked = (FSDP2, flag("offload_policy"), "trainer.save_freq=1", "trainer.use_legacy_worker_impl=disable")
    result = checked(*asked)
    (found,) = of_kind(result, "known")
    assert found.entry == "first"
    assert found.cases == ("fsdp2/policy/staged/state_dict.to.full_tensor", "fsdp2/policy/staged/state_dict")
    text = presentation.as_text(result)
    assert all(part in text for part in ("first: it breaks (crash)", "cause: a cause", "remedy: a remedy", "see a/b#1"))


def test_the_json_has_what_its_documentation_says() -> None:
    result = checked("verl_issue.md", version="0.7.1")
    data = json.loads(presentation.as_json(result))
    assert set(data) == {"framework", "exit_code", "cases", "uses", "findings"}
    assert set(data["uses"][0]) == {"role", "versions", "scenario", "why_not", "reasons", "extractions"}
    plain = {"kind", "sentence", "settings", "entry", "cases"}
    for finding in data["findings"]:
        more = {"verdict", "cause", "remedy", "references"} if finding["kind"] == "known" else set()
        assert set(finding) == plain | more
    assert data["cases"] == [case.id for case in cases(result)]
    assert data["exit_code"] == 1


@pytest.mark.parametrize("file", GOOD)
def test_no_line_of_the_text_that_could_be_broken_is_wider_than_120(file: str) -> None:
    wide = [line for line in presentation.as_text(checked(file)).splitlines() if len(line) > 120]
    assert [line for line in wide if len(line.split()) > 2] == []


@pytest.mark.parametrize(
    ("arguments", "code", "stdout", "stderr"),
    [
        (["verl_issue.md", "--framework-version", "0.7.1"], 1, r"fsdp2/policy/staged/state_dict\.to\.full_tensor", ""),
        (["trl.yaml", "--framework-version", "5.9"], 0, "nothing known to break", ""),
        (["broken.toml"], 2, "", r"^fsdp-doctor: .*broken\.toml:3: invalid TOML: Invalid value$"),
        (["trl.yaml", "--world-size", "0"], 2, "", "--world-size must be more than 0"),
        (
            ["trl.yaml", "--framework-version", "new"],
            2,
            "",
            "--framework-version new: this is not a version; use one like 0.7.1",
        ),
    ],
)
def test_the_command_ends_with_the_right_code_and_no_traceback(
    arguments: list[str], code: int, stdout: str, stderr: str
) -> None:
    finished = doctor("check", str(CONFIGS / arguments[0]), *arguments[1:])
    assert (finished.code, "Traceback" in finished.stderr) == (code, False), finished.stderr
    assert re.search(stdout, finished.stdout)
    assert re.search(stderr, finished.stderr.strip())
