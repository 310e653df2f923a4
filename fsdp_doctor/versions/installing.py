"""An environment for one version of torch: made by uv where there is one, else by venv and pip."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from packaging.requirements import InvalidRequirement, Requirement

import fsdp_doctor
from fsdp_doctor.errors import CannotRun
from fsdp_doctor.versions.child_process import child_process, kill_with_all_it_started

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = pathlib.Path(fsdp_doctor.__file__).parent
_LONGEST_REASON = 300


def make_environment(directory: pathlib.Path, requirements: Sequence[str], log: IO[str]) -> pathlib.Path:
    """Makes an environment in ``directory`` with the requirements and the doctor's own; returns its interpreter.

    Raises CannotRun with the installer's reason where they do not install.
    """
    wanted = [*requirements, *own_requirements()]
    python = directory / "bin" / "python"
    uv = shutil.which("uv")
    if uv:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(directory)], log)
        _run([uv, "pip", "install", "--quiet", "--python", str(python), *wanted], log)
    else:
        _run([sys.executable, "-m", "venv", str(directory)], log)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *wanted], log)
    return python


def own_requirements() -> list[str]:
    """What this doctor needs, as its metadata says, or in a checkout that is not installed its pyproject.toml."""
    try:
        declared = importlib.metadata.requires("fsdp-doctor") or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        declared = project["dependencies"]
    parsed = [Requirement(text) for text in declared]
    needed = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{one.name}{one.specifier}" for one in needed]


def exact_versions(requirements: Sequence[str]) -> dict[str, str]:
    """By package, the versions that requirements like ``transformers==5.23.0`` name; others are left out."""
    versions: dict[str, str] = {}
    for text in requirements:
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(text)
            exact = [one.version for one in wanted.specifier if one.operator == "=="]
            if exact:
                versions[wanted.name] = exact[0]
    return versions


def copy_of_the_doctor(directory: pathlib.Path) -> pathlib.Path:
    """Copies the package that runs, however it was installed; returns what goes into PYTHONPATH.

    So every version runs the same doctor, also when its sources change meanwhile, and sees nothing else of the
    environment that it is installed in.
    """
    shutil.copytree(_PACKAGE, directory / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def variables_of_another_python(**more: str) -> dict[str, str]:
    """This process's, without those that lead an interpreter to another one's packages."""
    own = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in own} | more


def _run(command: list[str], log: IO[str]) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        with child_process(
            command, kill_with_all_it_started, env=variables_of_another_python(), **streams
        ) as installer:
            output, _ = installer.communicate()
    except OSError as error:
        raise CannotRun(f"{command[0]} cannot be started: {error.strerror or error}") from None
    log.write(output)
    if installer.returncode:
        raise CannotRun(reason_of(output) or f"{command[0]} ended with exit code {installer.returncode}")


def reason_of(output: str) -> str:
    """What an installer complains of, on one line: pip's last error, or all that uv printed without its drawing."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    text = errors[-1] if errors else " ".join(lines)
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())[:_LONGEST_REASON]
