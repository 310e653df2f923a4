"""Runs the command line in this process, for tests of its output and exit code that need no separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import sys
from collections.abc import Mapping

import pytest

from fsdp_doctor.cli import app


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


def doctor(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None, cwd: pathlib.Path | None = None
) -> Done:
    """Runs ``fsdp-doctor ARGUMENTS`` outside of torchrun."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fsdp-doctor", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.chdir(cwd or os.getcwd())
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = _exit_code()
    return Done(code, _text(stdout), _text(stderr))


def _exit_code() -> int:
    try:
        app.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
