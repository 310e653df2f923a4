"""Output on a terminal: a live line while the probe runs, the matrix at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from support.places import ROOT

pytestmark = pytest.mark.processes

_SELECTED = ("--strategy", "fsdp2", "--offload", "none", "--method", "unshard,summon_full_params")


def _probe_on_a_terminal() -> str:
    """Returns what a terminal of 100 columns is sent."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fsdp_doctor", "probe", "--device", "cpu", *_SELECTED]
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT)
    os.close(theirs)
    sent = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the way Linux says that the other end is closed
            break
        if not data:
            break
        sent += data
    os.close(ours)
    assert program.wait() == 0, sent.decode()
    return sent.decode()


def test_a_terminal_gets_a_live_line_and_the_matrix() -> None:
    sent = _probe_on_a_terminal()
    assert "starting the workers" in sent
    assert re.search(r"[1-3]/4", sent), "cases done"
    assert re.search(r"1 bad", sent), "bad so far"
    assert "\x1b[" in sent, "colors"
    assert "fsdp2, staged" in sent, "the matrix"
