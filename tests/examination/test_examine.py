"""``examine``, on two ranks (examine_under_torchrun.py) and in one process."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from examine_under_torchrun import CHECKS
from program import TESTS, torchrun
from torch import nn

from fsdp_doctor import examine

# The first torch for which the emulated device can be built.
_OLDEST = (2, 10)
_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@functools.cache
def _outcomes() -> dict[str, str]:
    """The line about each check; one for all where the program ended before it could say more."""
    run = torchrun(
        "--nproc-per-node=2", str(TESTS / "examination" / "examine_under_torchrun.py"), env={"OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    ended = f"FAILED: ended with {run.code}: {run.stderr[-2000:]}"
    return dict.fromkeys(CHECKS, ended) | {line.split()[1].rstrip(":"): line for line in lines}


@pytest.mark.skipif(_VERSION < _OLDEST, reason="the emulated device needs torch 2.10")
@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check: str) -> None:
    outcome = _outcomes()[check]
    if not outcome.startswith("ok "):
        pytest.fail(outcome, pytrace=False)


def test_without_a_process_group_a_plain_model_is_said_not_to_be_fsdp() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    (found,) = examine(model, torch.optim.AdamW(model.parameters()), raise_on_bad=True).findings
    assert (found.kind, found.severity) == ("not-fsdp", "note")
    assert found.sentence.startswith("The Sequential is not an FSDP model")


def test_the_examination_prints_as_it_does_for_rich(capsys: pytest.CaptureFixture[str]) -> None:
    import rich

    examination = examine(nn.Linear(2, 2))
    rich.print(examination)
    shown = capsys.readouterr().out
    assert "2 parameters, 0 buffers" in shown
    assert "2 parameters, 0 buffers" in str(examination)
    assert len(repr(examination)) < 500


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, fsdp_doctor; assert 'torch' not in sys.modules; fsdp_doctor.examine; 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_entry_that_a_finding_names_is_in_the_catalogue() -> None:
    import inspect
    import re

    from fsdp_doctor.examination import findings
    from fsdp_doctor.known import catalogue

    named = set(re.findall(r'"((?:fsdp[12]|optim|non|full)[a-z0-9]*(?:-[a-z0-9]+){3,})"', inspect.getsource(findings)))
    assert len(named) >= 10
    assert not named - {entry.id for entry in catalogue.known_failures()}
