"""What verl's sender gives in verl's own engine, with the fix and without, on the installed release."""

from __future__ import annotations

import os
import pathlib

import pytest
from packaging.specifiers import SpecifierSet
from program import start_probe
from support.emulation import needs_emulation

from fsdp_doctor.fixes import list_fixes
from fsdp_doctor.machine.versions import read_installed_versions

_VERSION = read_installed_versions(["verl"]).get("verl")
pytestmark = pytest.mark.skipif(_VERSION is None, reason="verl is not installed: docs/frameworks.md says how")

_ALSO = ("verl:fsdp2/param+optimizer/get_per_tensor_param", "verl:fsdp/none/get_per_tensor_param")


def test_the_cured_cases_are_ok_with_the_fix_alone(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    (fix,) = [fix for fix in list_fixes("verl") if _VERSION and SpecifierSet(fix.versions).contains(_VERSION)]
    cases = (*fix.cures, *_ALSO)
    report = tmp_path / "report.json"
    # verl may be in a folder of PYTHONPATH.
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = [word for case in cases for word in ("--case", case)]
    done = start_probe(report, "--fix", *words, device="emulated", env=env).wait(report)
    assert {case: done.kind(f"{case}+fix") for case in cases} == dict.fromkeys(cases, "ok"), done
    assert {case: done.kind(case) for case in _ALSO} == dict.fromkeys(_ALSO, "ok"), done
    assert {done.kind(case) for case in fix.cures} - {"ok"}, done
