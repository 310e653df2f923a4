"""The scripts of examples/findings, run as jobs with the fix: none shows its finding any more.

tests/examples/test_finding_scripts.py runs the same scripts without the fix, and each shows it.
"""

from __future__ import annotations

import os
import sys

import pytest
from packaging.specifiers import SpecifierSet
from program import run
from support.emulation import needs_emulation
from support.places import ROOT

from fsdp_doctor.fixes import entry
from fsdp_doctor.machine.versions import read_installed_versions

# By the name of a fix, the script of a finding that it mends, and the packages that must find the emulated device.
_SCRIPTS = {
    "peft-fsdp1-adapter": ("peft_adapter_of_fsdp1_is_empty", "accelerate,peft"),
}


@pytest.mark.parametrize("id", _SCRIPTS)
def test_a_script_run_with_the_fix_does_not_show_its_finding(id: str) -> None:
    needs_emulation()
    fixes = [fix for fix in entry.FIXES if fix.id == id]
    version = read_installed_versions([fixes[0].distribution]).get(fixes[0].distribution)
    if version is None or not any(SpecifierSet(fix.versions).contains(version) for fix in fixes):
        pytest.skip(f"{fixes[0].distribution} {version} is not a release of the fix")
    name, packages = _SCRIPTS[id]
    script = ROOT / "examples" / "findings" / f"{name}.py"
    emulated = ("-m", "fsdp_doctor.emulated.in_place_of_cuda", "--in", f"{packages},{script}", "--devices", "2")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    job = (sys.executable, "-m", "fsdp_doctor", "fix", f"--only={id}", "--", *torchrun)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = run(sys.executable, *emulated, *job, env={"PYTHONPATH": path})
    assert (done.code, done.left) == (0, []), done
    assert done.stdout.splitlines().count("not shown") == 2, done
    assert "shown" not in done.stdout.splitlines(), done
    assert f"fix {id}: replaced on" in done.stderr, done
