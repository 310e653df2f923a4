"""Tests that what docs/tutorial.md has its reader save and run does what it says."""

from __future__ import annotations

import pathlib
import re

import pytest
from program import torchrun_script
from support.emulation import needs_emulation
from support.inside import doctor
from support.places import ROOT

_BLOCKS = dict(re.findall(r"^```(text|yaml|python)\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S))


@pytest.mark.parametrize(
    ("block", "file", "command", "code"), [("text", "job.log", "explain", 0), ("yaml", "verl.yaml", "check", 1)]
)
def test_the_log_and_the_configuration_lead_to_the_entry_of_the_catalogue(
    tmp_path: pathlib.Path, block: str, file: str, command: str, code: int
) -> None:
    (tmp_path / file).write_text(_BLOCKS[block])
    done = doctor(command, file, cwd=tmp_path)
    assert (done.code, "fsdp2-pinned-policy-half-moved" in done.stdout) == (code, True), done.stdout


def test_the_script_shows_the_half_moved_model_and_yields_its_weights_whole(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    script = tmp_path / "train.py"
    # Only the script's own directory is searched for modules.
    script.write_text(f"import sys; sys.path.append({str(ROOT)!r})\n{_BLOCKS['python']}")
    done = torchrun_script(script, tmp_path)
    assert done.code == 0, done.stderr
    assert "[fsdp2-pinned-policy-half-moved]" in done.stdout
    assert "1.weight (8, 8) emulated:0\n" in done.stdout
