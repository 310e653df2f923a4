"""Tests what a framework's function gives in its own engine, with the fix and without, on the installed release."""

from __future__ import annotations

import os
import pathlib

import pytest
from packaging.specifiers import SpecifierSet
from program import start_probe
from support.emulation import needs_emulation

from fsdp_doctor.fixes import entry
from fsdp_doctor.machine.versions import read_installed_versions

# By the name of a fix, cases that are ok without it, too.
_ALSO = {
    "verl-sender": ("verl:fsdp2/param+optimizer/get_per_tensor_param", "verl:fsdp/none/get_per_tensor_param"),
    "verl-checkpoint": (),
    "verl-offload": (),
    "skyrl-offload": (),
    "skyrl-adapter": (),
    "skyrl-tied": (),
    "trl-sender": (
        "trl:fsdp2/cpu_offload/tied/sync_weights.server",
        "trl:fsdp1-orig/none/uneven/sync_weights.colocate",
    ),
    "peft-fsdp1-adapter": (),
    "accelerate-full-load": ("accelerate:fsdp2/none/full/tied/load_state",),
    "accelerate-fsdp1-optimizer": (),
    "lightning-offload": (),
    "lightning-consolidation": ("lightning:fsdp/none/sharded/consolidate_checkpoint",),
    "trainer-offload-params": (),
    "transformers-offload": (),
    "transformers-offload-distributed": (),
}


@pytest.mark.parametrize("id", _ALSO)
def test_the_cured_cases_are_ok_with_the_fix_alone(id: str, tmp_path: pathlib.Path) -> None:
    fixes = [fix for fix in entry.FIXES if fix.id == id]
    framework = fixes[0].distribution
    version = read_installed_versions([framework]).get(framework)
    if version is None:
        pytest.skip(f"{framework} is not installed: docs/frameworks.md says how")
    needs_emulation()
    fix = next((fix for fix in fixes if SpecifierSet(fix.versions).contains(version)), None)
    if fix is None:
        pytest.skip(f"{framework} {version} is not a release of the fix")
    cases = (*fix.cures, *_ALSO[id])
    report = tmp_path / "report.json"
    # The framework may be in a folder of PYTHONPATH.
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [word for case in cases for word in ("--case", case)]
    done = start_probe(report, "--fix", *words, device="emulated", env=env).wait(report)
    assert {case: done.kind(f"{case}+fix") for case in cases} == dict.fromkeys(cases, "ok"), done
    ok = dict.fromkeys(_ALSO[id], "ok")
    assert {case: done.kind(case) for case in ok} == ok, done
    assert {done.kind(case) for case in fix.cures} - {"ok"}, done
