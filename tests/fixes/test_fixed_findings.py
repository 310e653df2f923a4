"""The scripts of examples/findings, run as jobs with the fix: none shows its finding any more.

tests/examples/test_finding_scripts.py runs the same scripts without the fix, and each shows it.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from packaging.specifiers import SpecifierSet
from program import doctor
from support.emulation import needs_emulation
from support.fixed_scripts import SCRIPTS
from support.places import ROOT
from support.shims import prepare_for

from fsdp_doctor.fixes import entry
from fsdp_doctor.machine.versions import read_installed_versions

_PROGRAM = """
import runpy, tempfile
import fsdp_doctor.emulated
from fsdp_doctor.emulated.library import _C
_C.set_device_count(2)
tempfile.tempdir = {directory!r}
{before}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(("id", "name", "adapter"), SCRIPTS, ids=[name for _, name, _ in SCRIPTS])
def test_a_script_run_with_the_fix_does_not_show_its_finding(
    id: str, name: str, adapter: str, tmp_path: pathlib.Path
) -> None:
    needs_emulation()
    fixes = [fix for fix in entry.FIXES if fix.id == id]
    version = read_installed_versions([fixes[0].distribution]).get(fixes[0].distribution)
    if version is None or not any(SpecifierSet(fix.versions).contains(version) for fix in fixes):
        pytest.skip(f"{fixes[0].distribution} {version} is not a release of the fix")
    script = str(ROOT / "examples" / "findings" / f"{name}.py")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(directory=str(tmp_path), before=prepare_for(adapter), script=script))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = doctor("fix", f"--only={id}", "--", *torchrun, env={"PYTHONPATH": path}, cwd=tmp_path)
    assert (done.code, done.left) == (0, []), done
    # The ranks' lines may run into one another.
    assert (done.stdout.count("not shown"), done.stdout.count("shown")) == (2, 2), done
    assert f"fix {id}: replaced on" in done.stderr, done
