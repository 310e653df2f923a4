"""`fsdp-doctor check` in a real process: pipes that nobody writes to, endless devices, Ctrl-C, and its memory."""

from __future__ import annotations

import os
import pathlib
import sys
import threading

import pytest
from program import Started, run
from support.places import TESTS

_CONFIGS = TESTS / "check" / "configs"
_TRL = str(_CONFIGS / "trl.yaml")


def _check(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fsdp_doctor", "check", *arguments)


@pytest.fixture
def pipe(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_read_when_it_is_written_to_and_the_wait_is_said(pipe: pathlib.Path) -> None:
    started = Started(*_check(str(pipe), "--framework-version", "5.9"))
    said = started.first_message()
    threading.Thread(target=pipe.write_bytes, args=(pathlib.Path(_TRL).read_bytes(),), daemon=True).start()
    finished = started.wait()
    assert finished.code == 0, finished.stderr
    assert str(pipe) in said
    assert "nothing known to break" in finished.stdout


def test_ctrl_c_ends_the_wait(pipe: pathlib.Path) -> None:
    started = Started(*_check(str(pipe)))
    started.first_message()
    started.interrupt()
    finished = started.wait()
    assert finished.code == 130
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/zero"])
def test_an_endless_device_is_read_to_a_limit(device: str) -> None:
    finished = run(*_check(device))
    assert finished.code == 2
    assert f"{device} is larger than 4 MiB" in finished.stderr
