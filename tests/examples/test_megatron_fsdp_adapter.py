"""The adapter of examples/adapters/megatron_fsdp, outside of the package: read always, run where Megatron-FSDP is."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from program import start_probe
from support.emulation import needs_emulation
from support.places import ROOT, TESTS

from fsdp_doctor.machine.versions import read_installed_versions

_ROOM = ROOT / "examples" / "adapters" / "megatron_fsdp"
_NAME = "megatron_fsdp_adapter:ADAPTER"
_PLACES = [str(_ROOM), str(ROOT), str(TESTS)]
_IS_INSTALLED = bool(read_installed_versions(["megatron-fsdp"])) and bool(importlib.util.find_spec("megatron_fsdp"))
# Where it is installed into a directory of its own, that is on PYTHONPATH.
_FROM_OUTSIDE = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([*_PLACES, *_FROM_OUTSIDE])}
_AT_README = re.compile(r"^megatron_fsdp_adapter:ADAPTER:(\S+) +(\w+)", re.MULTILINE)


@pytest.fixture(autouse=True)
def _finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process find the adapter, too: it reads the reports."""
    monkeypatch.syspath_prepend(_ROOM)


def test_its_cases_are_listed_without_the_framework_and_without_torch() -> None:
    program = (
        "import sys; from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix\n"
        f"print(len(read_matrix({_NAME!r}).configurations), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | _ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["16", "False"], done.stderr


@pytest.mark.skipif(_IS_INSTALLED, reason="megatron-fsdp is installed")
def test_without_the_package_each_case_is_unsupported_and_says_so(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    json_file = tmp_path / "report.json"
    arguments = ("--framework", _NAME, "--level", "quick")
    run = start_probe(json_file, *arguments, device="emulated", env=_ENVIRONMENT).wait(json_file)
    assert run.report is not None, run
    verdicts = {(result.verdict.kind, result.verdict.reason) for result in run.report.results}
    assert verdicts == {("unsupported", "megatron-fsdp is not installed")}, run


@pytest.mark.skipif(not _IS_INSTALLED, reason="megatron-fsdp is not installed")
def test_it_finds_what_its_page_prints(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    json_file = tmp_path / "report.json"
    words = "optim_grads_params and not (uneven or tied or buffers or lora or clip_grad_norm)"
    run = start_probe(json_file, "--framework", _NAME, "-k", words, device="emulated", env=_ENVIRONMENT).wait(json_file)
    assert run.report is not None, run
    found = {result.id.removeprefix(f"{_NAME}:"): result.verdict.kind for result in run.report.results}
    printed = dict(_AT_README.findall((_ROOM / "README.md").read_text()))
    # A hang takes five minutes.
    del printed["none/optim_grads_params/clip_grad_norm/fully_shard"]
    assert found == printed, run
