"""``fsdp-doctor check --fix``: one setting is changed, nothing else, and then nothing is known to fail."""

from __future__ import annotations

import difflib
import pathlib

import pytest
from support.checked import CONFIGS, checked
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.known.catalogue import find_entry


def _list_changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line.startswith(("+ ", "- "))]


@pytest.mark.parametrize(
    ("file", "version", "changed"),
    [
        ("verl_sft.yaml", "0.7.1", ["-   offload_policy: true", "+   offload_policy: false"]),
        ("verl_policy.sh", "0.7.1", ["-     actor_rollout_ref.actor.fsdp_config.offload_policy=$offload \\"]),
    ],
)
def test_the_file_with_one_setting_changed_is_printed_and_breaks_nothing(
    file: str, version: str, changed: list[str], tmp_path: pathlib.Path
) -> None:
    assert checked(file, version=version).exit_code == 1
    done = doctor("check", str(CONFIGS / file), "--framework-version", version, "--fix")
    assert done.code == 0
    assert _list_changed_lines((CONFIGS / file).read_text(), done.stdout) == changed
    copy = tmp_path / file
    copy.write_text(done.stdout)
    assert checked(str(copy), version=version).exit_code == 0


def test_what_one_setting_leaves_out_of_a_remedy_is_told() -> None:
    file = CONFIGS / "verl_policy.sh"
    done = doctor("check", str(file), "--framework-version", "0.7.1", "--fix")
    broken = {
        finding.entry for finding in checked(file.name, version="0.7.1").findings if finding.bad and finding.entry
    }
    remedies = [find_entry(name).advise("verl") for name in broken]
    assert any(remedies)
    assert all(remedy in done.stderr for remedy in remedies)


def test_write_changes_the_file_and_keeps_its_comments(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "sft.yaml"
    text = (CONFIGS / "verl_sft.yaml").read_text().replace("offload_policy: true", "offload_policy: True  # memory")
    file.write_text(text)
    done = doctor("check", str(file), "--framework-version", "0.7.1", "--fix", "--write")
    assert (done.code, done.stdout) == (0, "")
    assert file.read_text() == text.replace("offload_policy: True  # memory", "offload_policy: False  # memory")


def test_a_remedy_is_carried_out_and_what_is_left_is_said(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "examples/verl-5995/config.txt").read_text()
    file = tmp_path / "config.txt"
    file.write_text(text)
    arguments = ("check", str(file), "--framework-version", "all", "--fix")
    done = doctor(*arguments)
    key = "actor_rollout_ref.actor.fsdp_config.offload_policy"
    assert (done.code, _list_changed_lines(text, done.stdout)) == (1, [f"- {key}=true", f"+ {key}=false"]), done
    assert "the changed file still has state-dict-held-across-offload" in done.stderr
    assert "the changed file still has fsdp2-pinned-policy-half-moved" not in done.stderr
    assert doctor(*arguments, "--write").code == 1
    left = {finding.entry for finding in checked(str(file), version="all").findings if finding.bad}
    assert left == {"state-dict-held-across-offload"}


def test_where_no_single_setting_mends_it_that_is_said() -> None:
    done = doctor("check", str(CONFIGS / "verl_grpo.yaml"), "--framework-version", "0.7.1", "--fix")
    assert (done.code, done.stdout) == (3, "")
    assert "no change of a single setting" in done.stderr


def test_write_alone_is_refused() -> None:
    assert doctor("check", str(CONFIGS / "verl_sft.yaml"), "--write").code == 2
