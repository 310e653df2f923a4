"""The command line without torch, on each version of Python that is declared and that this machine has."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys

import pytest
import typer
from packaging.requirements import Requirement
from program import Run, run
from support.places import ROOT, TESTS

from fsdp_doctor.cli.app import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(_PROJECT["classifiers"]))
_NEEDED = [text for text in _PROJECT["dependencies"] if Requirement(text).name not in ("torch", "transformers")]
_INSTALL_SECONDS = "60"
_DESCRIBE = """
import importlib.util, sys
print("%d.%d" % sys.version_info[:2], importlib.util.find_spec("torch") is not None)
"""


@functools.cache
def _interpreter(version: str) -> str | None:
    """Returns an interpreter that runs and has no torch.

    pyenv leaves names on PATH that lead to no interpreter, and an environment that is active comes first on PATH.
    """
    name = f"python{version}"
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv")
    for candidate in (shutil.which(name), *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))):
        if candidate and run(candidate, "-c", _DESCRIBE).stdout == f"{version} False\n":
            return candidate
    return None


def _packages(python: str, version: str, cache: pytest.Cache) -> pathlib.Path:
    """A directory with the packages of the command line, kept from one run of the tests to the next."""
    digest = hashlib.sha256(" ".join(_NEEDED).encode()).hexdigest()[:16]
    directory = cache.mkdir(f"command-line-{version}-{digest}")
    if not (directory / "complete").exists():
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--upgrade")
        done = run(
            *pip, "--target", str(directory), *_NEEDED, env={"PYTHONPATH": "", "PIP_DEFAULT_TIMEOUT": _INSTALL_SECONDS}
        )
        if done.code != 0:
            pytest.skip(f"the packages of the command line cannot be installed for {python}: {done.stderr[-300:]}")
        (directory / "complete").touch()
    return directory


def _commands(command: object, words: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Maps each command to its options in this interpreter, without those that typer adds."""
    options = {" ".join(words): {name for each in command.params for name in each.opts if name.startswith("--")}}  # type: ignore[attr-defined]
    for name, inner in getattr(command, "commands", {}).items():
        options |= _commands(inner, (*words, name))
    return options


@pytest.fixture(scope="module", params=_VERSIONS)
def ran(request: pytest.FixtureRequest) -> Run:
    python = _interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no python{request.param} here")
    packages = _packages(python, request.param, request.config.cache)
    done = run(python, str(TESTS / "cli" / "without_torch.py"), env={"PYTHONPATH": str(packages)})
    assert done.code == 0, done
    return done


def test_every_command_has_its_options_and_those_that_need_no_torch_work(ran: Run) -> None:
    printed = {command: set(options) - {"--help"} for command, options in json.loads(ran.stdout).items()}
    assert printed == _commands(typer.main.get_command(app))


def test_the_declared_versions_of_python_begin_with_the_oldest_that_is_required() -> None:
    assert _PROJECT["requires-python"] == f">={_VERSIONS[0]}"
