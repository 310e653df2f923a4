"""Tests that the program of docs/library.md sends, saves and loads the weights on two ranks."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from support.forked import run_script
from support.places import ROOT

from fsdp_doctor.checkpoints.verification import verify

_PROGRAMS = re.findall(r"^```python\n(import sys\n.*?)^```", (ROOT / "docs/library.md").read_text(), re.M | re.S)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)


def test_the_program_of_the_library_resumes_in_the_same_bits(tmp_path: pathlib.Path) -> None:
    script, checkpoint = tmp_path / "weights.py", tmp_path / "step-1"
    [text] = _PROGRAMS
    script.write_text(f'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n{text}')
    run = run_script(script, device="cpu", arguments=[str(checkpoint)])
    assert run.codes == [0, 0], run.output
    assert run.output.count("the resumed run is the same") == 2
    assert run.output.count("send ") == 4
    assert verify(checkpoint).answer == "sound"
