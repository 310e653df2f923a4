"""`fsdp-doctor check` says for which versions it read a configuration, and for which each finding holds."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from msgspec.structs import replace
from support.checked import FSDP2, checked, entry, flag, of_kind, said

from fsdp_doctor.check import check, presentation
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.failures import RankRange, Trigger


def _with_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(distribution: str) -> str:
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_the_versions_that_are_installed_are_taken_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_installed(monkeypatch, accelerate="1.6.0", torch="2.7.1+cu126")
    asked = ["distributed_type=FSDP", "fsdp_config.fsdp_offload_params=true", "fsdp_config.fsdp_version=2"]
    result = check(asked)
    assert [use.scenario.backend for use in result.uses if use.scenario] == ["device-only"]
    assert (result.version.source, result.torch.source) == ("installed here", "installed here")
    data = json.loads(presentation.render_json(result))
    assert (data["version"], data["torch"], data["read_in"]) == ("1.6.0", "2.7.1+cu126", "1.6.0 to 1.15.0")


def test_a_given_version_overrides_the_installed_version_and_all_means_every_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _with_installed(monkeypatch, transformers="5.23.0")
    asked = ["fsdp=full_shard", "output_dir=out"]
    assert len(check(asked).uses) == 1
    given = check(asked, framework_version="4.56")
    assert [use.scenario.strategy for use in given.uses if use.scenario] == ["fsdp1-orig"]
    assert (given.version.source, str(given.version.version)) == ("given", "4.56")
    every = check(asked, framework_version="all")
    assert len(every.uses) == 2
    assert every.version.version is None


def test_the_version_is_asked_for_only_where_it_decides() -> None:
    asked = "give --framework-version"
    assert asked in said(checked(FSDP2, flag("offload_policy")), "note")
    assert asked not in said(checked(FSDP2, flag("offload_policy"), version="0.9.0"), "note")
    assert asked not in said(checked("training.enable_cpu_offload=true"), "note")


def test_a_known_failure_names_the_versions_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (entry("first", offload=("policy*",), staging=("staged",)),)
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: entries)
    (finding,) = of_kind(checked(FSDP2, flag("offload_policy")), "known")
    assert finding.holds_for == ("actor, v0.6 and v0.7, use_legacy_worker_impl=disable",)


def test_a_failure_of_another_torch_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(entry("first", offload=("policy*",)), torch="<2.9")
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: (old,))
    asked = [FSDP2, flag("offload_policy")]
    for torch, expected in (("2.8.0", 1), ("2.9.0", 0), ("all", 1)):
        result = check(asked, framework_version="0.9.0", torch_version=torch)
        assert len(of_kind(result, "known")) == expected


@pytest.mark.parametrize(("ranks", "expected"), [(1, "on one GPU"), (2, "on several"), (64, "on several")])
def test_the_expected_failures_are_those_of_the_configured_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, expected: str
) -> None:
    alone = replace(entry("on one GPU"), triggers=(Trigger({}, shard_group=RankRange(max=1)),))
    many = replace(entry("on several"), triggers=(Trigger({}, shard_group=RankRange(min=2)),))
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: (alone, many))
    result = checked(FSDP2, f"trainer.n_gpus_per_node={ranks}", version="0.9.0")
    assert [finding.entry for finding in of_kind(result, "known")] == [expected]
    assert result.world_size == ranks


def test_uneven_shards_are_expected_where_the_ranks_are_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = replace(entry("uneven"), triggers=(Trigger({}, shards=("uneven",)),))
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: (uneven,))
    asked = [FSDP2, "actor_rollout_ref.model.lora_rank=8"]
    by_ranks = {ranks: of_kind(checked(*asked, version="0.9.0", world=ranks), "known") for ranks in (2, 3, 8, 12)}
    assert {ranks: bool(findings) for ranks, findings in by_ranks.items()} == {2: False, 3: True, 8: False, 12: True}


def test_a_missing_setting_has_the_default_of_the_given_version() -> None:
    asked = (FSDP2, flag("offload_policy"))
    exit_codes = {
        word: checked(
            *asked, *(f"trainer.use_legacy_worker_impl={word}" for word in [word] if word), version="0.7.1"
        ).exit_code
        for word in ("", "auto", "disable")
    }
    assert exit_codes[""] == exit_codes["auto"] != exit_codes["disable"]


def test_a_finding_of_one_version_of_peft_says_so() -> None:
    asked = ("actor_rollout_ref.model.path=m", "actor_rollout_ref.model.lora_rank=16", "trainer.n_gpus_per_node=8")
    result = checked(*asked, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.layered_summon=True")
    assert "layered-summon-collects-nothing" in {finding.entry for finding in result.findings}
    said_of_it = presentation.render_text(result).partition("layered-summon-collects-nothing")[2]
    assert "only with peft >=0.21" in said_of_it
