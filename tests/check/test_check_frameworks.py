"""`fsdp-doctor check` reads configurations of accelerate, transformers, TRL and torchtitan; how it reports findings."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from support.checked import CONFIGS, FSDP2, GOOD, checked, entry, flag, ids, of_kind, said, use_of
from support.inside import doctor

from fsdp_doctor.check import cases, check, presentation
from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import catalogue

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
    assert set(data) == {
        *("framework", "version", "torch", "world_size", "read_in", "exit_code", "cases", "uses", "findings")
    }
    assert set(data["uses"][0]) == {"role", "versions", "scenario", "why_not", "reasons", "extractions"}
    plain = {"kind", "sentence", "settings", "entry", "cases", "holds_for"}
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
        (["trl.yaml", "--torch-version", "new"], 2, "", "--torch-version new: this is not a version"),
        (["verl_megatron.sh"], 3, "verl: not FSDP, nothing to check", ""),
    ],
)
def test_the_command_ends_with_the_right_code_and_no_traceback(
    arguments: list[str], code: int, stdout: str, stderr: str
) -> None:
    finished = doctor("check", str(CONFIGS / arguments[0]), *arguments[1:])
    assert (finished.code, "Traceback" in finished.stderr) == (code, False), finished.stderr
    assert re.search(stdout, finished.stdout)
    assert re.search(stderr, finished.stderr.strip())


def test_a_key_outside_of_accelerates_section_is_a_conflict_in_its_file_and_none_as_a_flag(
    tmp_path: pathlib.Path,
) -> None:
    file, script = tmp_path / "fsdp.yaml", tmp_path / "run.sh"
    file.write_text("distributed_type: FSDP\nfsdp_offload_params: true\nfsdp_config: {fsdp_version: 2}\n")
    assert "fsdp_offload_params belongs into fsdp_config" in said(check([str(file)]), "conflict")
    script.write_text("accelerate launch --use_fsdp --fsdp_version 2 train.py --fsdp_offload_params true\n")
    assert said(check([str(script)]), "conflict") == ""


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
def test_a_load_on_one_rank_that_no_other_is_sent_is_a_conflict(
    tmp_path: pathlib.Path, settings: str, refused: bool
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  {settings}\n")
    assert ("without sync_module_states" in said(check([str(file)]), "conflict")) == refused


_LIGHTNING = "import lightning as L\nstrategy = FSDPStrategy(cpu_offload=True)\n"


@pytest.mark.parametrize(
    ("trainers", "offloads"),
    [
        ("L.Trainer(devices=4, strategy=strategy)\n", ["policy"]),
        ("L.Trainer(devices=4, strategy='ddp')\n", []),
        ("L.Trainer(devices=4, strategy='fsdp')\n", ["none"]),
        ("L.Trainer(devices=4, strategy=strategy)\nL.Trainer(devices=1, strategy='ddp')\n", ["policy"]),
    ],
    ids=["given", "another", "by name", "two trainers"],
)
def test_a_strategy_that_the_trainer_is_not_given_is_not_read(
    tmp_path: pathlib.Path, trainers: str, offloads: list[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(_LIGHTNING + trainers)
    result = check([str(file)], framework_version="2.6.5")
    assert [use.scenario.offload for use in result.uses if use.scenario] == offloads
