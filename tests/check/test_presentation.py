"""Tests what `fsdp-doctor check` prints, as text and as JSON, and how it ends."""

from __future__ import annotations

import json
import re

import pytest
from support.checked import CONFIGS, FSDP2, GOOD, checked, entry, flag, of_kind
from support.inside import doctor

from fsdp_doctor import check as check_package
from fsdp_doctor.check import list_cases, presentation
from fsdp_doctor.known import catalogue


def test_a_catalogue_entry_is_one_finding_with_all_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (entry("first", offload=("policy*",), staging=("staged",)), entry("never", strategy=("fsdp1-orig",)))
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: entries)
    asked = (FSDP2, flag("offload_policy"), "trainer.save_freq=1", "trainer.use_legacy_worker_impl=disable")
    result = checked(*asked)
    (finding,) = of_kind(result, "known")
    assert finding.entry == "first"
    assert finding.cases == ("fsdp2/policy/staged/state_dict.to.full_tensor", "fsdp2/policy/staged/state_dict")
    text = presentation.render_text(result)
    assert all(part in text for part in ("it breaks", "a cause", "a remedy", "a/b#1", *finding.cases))


def test_the_json_has_what_its_documentation_says() -> None:
    result = checked("verl_policy.sh", version="0.7.1")
    data = json.loads(presentation.render_json(result))
    assert set(data) == {
        *("framework", "version", "torch", "world_size", "read_in", "exit_code", "cases", "uses", "findings")
    }
    assert set(data["uses"][0]) == {"role", "versions", "scenario", "why_not", "reasons", "extractions"}
    plain = {"kind", "sentence", "settings", "entry", "cases", "holds_for", "decides"}
    for finding in data["findings"]:
        of_entry = {"verdict", "cause", "remedy", "remedy_run", "references", "conditions", "remedy_here", "fix"}
        assert set(finding) == (plain | of_entry if finding["kind"] == "known" else plain)
    assert data["cases"] == [case.id for case in list_cases(result)]
    assert data["exit_code"] == 1


def test_no_breakable_line_of_the_text_is_wider_than_120_characters() -> None:
    lines = [line for file in GOOD for line in presentation.render_text(checked(file)).splitlines()]
    assert [line for line in lines if len(line) > 120 and len(line.split()) > 2] == []


def test_the_findings_come_first_and_the_versions_are_numbered_rows() -> None:
    text = presentation.render_text(checked("verl_grpo.yaml"))
    assert text.index("Conflicts") < text.index("versions") < text.index("fsdp-doctor probe")
    assert "(1) v0.4 to v0.7, use_legacy_worker_impl=auto or enable" in text
    assert "staged/state_dict.to.full_tensor (4)" in text


@pytest.mark.parametrize(
    ("arguments", "code", "stdout", "stderr"),
    [
        (["verl_policy.sh", "--framework-version", "0.7.1"], 1, r"fsdp2/policy/staged/state_dict\.to\.full_tensor", ""),
        (["trl.yaml", "--framework-version", "5.9"], 0, "fsdp1-orig/none/unstaged/summon_full_params", ""),
        (["broken.toml"], 2, "", r"^fsdp-doctor: .*broken\.toml:3: invalid TOML: Invalid value$"),
        (["trl.yaml", "--world-size", "0"], 2, "", "--world-size"),
        (["trl.yaml", "--framework-version", "new"], 2, "", "--framework-version new"),
        (["trl.yaml", "--torch-version", "new"], 2, "", "--torch-version new"),
        (["verl_megatron.sh"], 3, "not FSDP", ""),
    ],
)
def test_the_command_ends_with_the_right_code_and_no_traceback(
    arguments: list[str], code: int, stdout: str, stderr: str
) -> None:
    finished = doctor("check", str(CONFIGS / arguments[0]), *arguments[1:])
    assert (finished.code, "Traceback" in finished.stderr) == (code, False), finished.stderr
    assert re.search(stdout, finished.stdout)
    assert re.search(stderr, finished.stderr.strip())


@pytest.mark.parametrize(("peft", "shown"), [("0.20.0", False), ("0.21.0", True), (None, True)])
def test_a_failure_of_some_peft_releases_names_these_and_the_installed_release(
    peft: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured with peft 0.18.1, 0.20.0 and 0.21.0: the adapter is empty from 0.21.0 on."""
    monkeypatch.setattr(check_package, "read_installed_versions", lambda _: {"peft": peft} if peft else {})
    result = check_package.check([str(CONFIGS / "verl_lora.sh")], framework_version="0.7.1")
    conditions = [line for line in presentation.render_text(result).splitlines() if "only with peft >=0.21" in line]
    assert bool(conditions) == shown
    assert all((peft or "not known") in line for line in conditions)


@pytest.mark.parametrize(
    "arguments",
    [
        *((file,) for file in GOOD),
        *(
            (f"actor_rollout_ref.actor.strategy={strategy}", "actor_rollout_ref.actor.grad_clip=1", setting)
            for strategy in ("fsdp", "fsdp2")
            for setting in (flag("offload_policy"), flag("param_offload"), "actor_rollout_ref.model.lora_rank=8")
        ),
    ],
    ids=" ".join,
)
def test_every_known_failure_in_a_configuration_has_a_remedy_for_its_framework(
    arguments: tuple[str, ...],
) -> None:
    for version in ("all", "0.7.1", "main"):
        result = checked(*arguments, version=version)
        entries = [catalogue.find_entry(finding.entry) for finding in of_kind(result, "known")]
        assert [entry.id for entry in entries if result.version.of not in entry.remedies] == []


def test_a_finding_says_first_what_the_user_of_that_framework_sets() -> None:
    text = presentation.render_text(checked("verl_policy.sh", version="0.7.1"))
    assert text.index("in verl: Install verl 0.8.0") < text.index("remedy: ")
