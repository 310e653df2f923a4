"""PyTorch's own FSDP, DTensor, checkpoints and collectives do on the emulated device what they promise."""

from __future__ import annotations

import json

import pytest
import torch
from fsdp_on_emulation import CHECKS
from program import TESTS, Run, torchrun

_PROGRAM = str(TESTS / "emulated" / "fsdp_on_emulation.py")
# The first torch for which the device can be built.
_OLDEST = (2, 10)
_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

Errors = dict[str, dict[int, str]]  # of a check, by rank

pytestmark = pytest.mark.skipif(_VERSION < _OLDEST, reason="the emulated device needs torch 2.10")


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def errors(request: pytest.FixtureRequest) -> Errors:
    """What each rank said of each check. A check that ends its processes does not keep the others from running."""
    found: Errors = {}
    names = list(CHECKS)
    while names:
        run = torchrun(f"--nproc-per-node={request.param}", _PROGRAM, *names, env={"OMP_NUM_THREADS": "1"})
        found |= _said(run)
        ended = [name for name in names if len(found.get(name, {})) == request.param]
        if len(ended) < len(names):
            found.setdefault(names[len(ended)], {})[-1] = f"ended with {run.code}: {run.stderr[-2000:]}"
        names = names[len(ended) + 1 :]
    return found


def _said(run: Run) -> Errors:
    errors: Errors = {}
    for line in run.stdout.splitlines():
        if line.startswith('{"check"'):
            said = json.loads(line)
            errors.setdefault(said["check"], {})[said["rank"]] = said["error"]
    return errors


@pytest.mark.parametrize("check", CHECKS)
def test_the_emulated_device_keeps_the_promise(errors: Errors, check: str) -> None:
    failed = {rank: error for rank, error in errors[check].items() if error}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
