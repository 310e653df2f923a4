"""The patches that need torch alone, applied to copies of the installed releases, which then do not fail.

The scripts of the findings run without this library, but for the emulated device and what makes a framework find it.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest
from packaging.specifiers import SpecifierSet
from program import run, start_probe
from support.emulation import needs_emulation
from support.fixed_scripts import SCRIPTS
from support.inside import doctor
from support.places import ROOT
from support.shims import prepare_for

from fsdp_doctor.fixes import FrameworkFix, entry
from fsdp_doctor.fixes.patches import read_edits
from fsdp_doctor.machine.imports import find_source_file
from fsdp_doctor.machine.versions import read_installed_versions

_EDITED = tuple(dict.fromkeys(edit.fix for edit in read_edits()))
_PROGRAM = """
import runpy, sys, tempfile
import fsdp_doctor.emulated
from fsdp_doctor.emulated.library import _C
_C.set_device_count(2)
tempfile.tempdir = {directory!r}
{before}
for name in [name for name in sys.modules if name.startswith("fsdp_doctor")]:
    if not name.startswith("fsdp_doctor.emulated"):
        del sys.modules[name]

class Refusing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "fsdp_doctor":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refusing)
runpy.run_path({script!r}, run_name="__main__")
"""


def _choose(ids: Iterable[str]) -> list[FrameworkFix]:
    """Chooses the fixes for the installed releases."""
    chosen = []
    for fix in [fix for fix in entry.FIXES if fix.id in ids]:
        version = read_installed_versions([fix.distribution]).get(fix.distribution)
        if version is not None and SpecifierSet(fix.versions).contains(version):
            chosen.append(fix)
    if not chosen:
        pytest.skip(f"no release of {' and '.join(ids)} is installed")
    return chosen


def _patch_copy(fixes: list[FrameworkFix], place: pathlib.Path) -> str:
    """Patches a copy of the release that has the functions. Returns a PYTHONPATH that begins with its folder."""
    written = doctor("fix", fixes[0].framework, *(f"--only={fix.id}" for fix in fixes), "--diff")
    assert written.code == 0, written
    assert "fsdp_doctor" not in written.stdout
    package = fixes[0].module.partition(".")[0]
    source = find_source_file(package)
    assert source is not None
    # dill takes modules in a folder of another name for the user's own.
    folder = place / "site-packages"
    shutil.copytree(source.parent, folder / package, copy_function=os.symlink)
    for line in written.stdout.splitlines():
        if line.startswith("+++ b/"):
            file = folder / line.removeprefix("+++ b/").split("\t")[0]
            original = file.resolve()
            file.unlink()
            shutil.copy(original, file)
    subprocess.run(["patch", "-p1"], input=written.stdout, text=True, cwd=folder, check=True, capture_output=True)
    return os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(("id", "name", "adapter"), SCRIPTS, ids=[name for _, name, _ in SCRIPTS])
def test_a_finding_is_not_shown_in_the_patched_release(
    id: str, name: str, adapter: str, tmp_path: pathlib.Path
) -> None:
    needs_emulation()
    path = _patch_copy(_choose([id]), tmp_path)
    script = str(ROOT / "examples" / "findings" / f"{name}.py")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(directory=str(tmp_path), before=prepare_for(adapter), script=script))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program))
    done = run(sys.executable, *torchrun, env={"PYTHONPATH": path}, cwd=tmp_path)
    assert (done.code, done.left) == (0, []), done
    # The ranks' lines may run into one another.
    assert (done.stdout.count("not shown"), done.stdout.count("shown")) == (2, 2), done


@pytest.mark.parametrize("framework", dict.fromkeys(fix.framework for fix in entry.FIXES if fix.id in _EDITED))
def test_the_cured_cases_are_ok_in_the_patched_release(framework: str, tmp_path: pathlib.Path) -> None:
    needs_emulation()
    fixes = _choose([fix.id for fix in entry.FIXES if fix.framework == framework and fix.id in _EDITED])
    path = _patch_copy(fixes, tmp_path)
    cures = dict.fromkeys(case for fix in fixes for case in fix.cures)
    report = tmp_path / "report.json"
    words = [word for case in cures for word in ("--case", case)]
    done = start_probe(report, *words, device="emulated", env={"PYTHONPATH": path}).wait(report)
    assert {case: done.kind(case) for case in cures} == dict.fromkeys(cures, "ok"), done
