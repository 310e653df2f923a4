"""examples/verl-5995, from the log to the fixed job, with the verl that is installed."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import pytest
from packaging.specifiers import SpecifierSet
from program import Run, run
from support.emulation import needs_emulation
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.machine.versions import read_installed_versions

_VERSION = read_installed_versions(["verl"]).get("verl")
pytestmark = pytest.mark.skipif(_VERSION is None, reason="verl is not installed: docs/frameworks.md says how")
_EXAMPLE = ROOT / "examples" / "verl-5995"
_EMULATED = ("-m", "fsdp_doctor.emulated.in_place_of_cuda", "--in", "verl", "--devices", "2")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "sync.py")


def _start(place: pathlib.Path, *command: str) -> Run:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return run(sys.executable, *_EMULATED, *command, env={"PYTHONPATH": path}, cwd=place)


def test_the_fix_that_explain_names_mends_the_job_of_the_issue(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    shutil.copy(_EXAMPLE / "sync.py", tmp_path)
    command = next(line for line in doctor("explain", "log.txt", cwd=_EXAMPLE).stdout.splitlines() if "fix --" in line)
    words = command.partition("fsdp-doctor ")[2].partition(" COMMAND")[0].split()
    before = _start(tmp_path, *_TORCHRUN)
    after = _start(tmp_path, sys.executable, "-m", "fsdp_doctor", words[0], "--verify", *words[1:], *_TORCHRUN)
    assert (after.code, after.left, after.stdout.count("trained on")) == (0, [], 2), after
    is_affected = SpecifierSet("<0.8").contains(_VERSION or "")
    assert (before.code != 0) == is_affected, before
    assert ("Attempted to set the storage" in before.stderr) == is_affected
