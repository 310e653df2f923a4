"""What verl's sender gives in verl's own engine, with the fix and without, on the installed release."""

from __future__ import annotations

import os
import pathlib

import pytest
from packaging.specifiers import SpecifierSet
from program import Run, start_probe
from support.emulation import needs_emulation

from fsdp_doctor.fixes import list_fixes
from fsdp_doctor.machine.versions import read_installed_versions

_VERSION = read_installed_versions(["verl"]).get("verl")
pytestmark = pytest.mark.skipif(_VERSION is None, reason="verl is not installed: docs/frameworks.md says how")

# Python executes it when a worker starts; the fix is applied once verl's engine has been imported.
_SITECUSTOMIZE = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "verl.workers.engine.fsdp.transformer_impl":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_apply(module):
            execute(module)
            from fsdp_doctor import fixes
            fixes.apply("verl")
        spec.loader.exec_module = execute_and_apply
        return spec
sys.meta_path.insert(0, Finder())
"""
_ALSO = ("verl:fsdp2/param+optimizer/get_per_tensor_param", "verl:fsdp/none/get_per_tensor_param")


def _probe_cases(report: pathlib.Path, cases: tuple[str, ...], *first: pathlib.Path) -> Run:
    # An interpreter of its own: one that is forked executes no sitecustomize. verl may be in a folder of PYTHONPATH.
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH")]))}
    words = [word for case in cases for word in ("--case", case)]
    return start_probe(report, *words, device="emulated", env=env).wait(report)


def test_the_cured_cases_are_ok_with_the_fix_alone(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    (fix,) = [fix for fix in list_fixes("verl") if _VERSION and SpecifierSet(fix.versions).contains(_VERSION)]
    cases = (*fix.cures, *_ALSO)
    before = _probe_cases(tmp_path / "before.json", cases)
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    after = _probe_cases(tmp_path / "after.json", cases, tmp_path)
    assert {case: after.kind(case) for case in cases} == dict.fromkeys(cases, "ok"), after
    assert {case: before.kind(case) for case in _ALSO} == dict.fromkeys(_ALSO, "ok"), before
    assert {before.kind(case) for case in fix.cures} - {"ok"}, before
