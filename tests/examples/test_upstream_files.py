"""The files of examples/upstream: short, and each gives what stands beside it with the versions that stand there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import sys

import pytest
from program import run
from support.emulation import needs_emulation
from support.places import ROOT

_UPSTREAM = ROOT / "examples" / "upstream"
_FILES = sorted(_UPSTREAM.glob("test_*.py"))
_EACH = pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
_LINES = 30


@_EACH
def test_a_file_gives_the_output_that_stands_beside_it(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    upstream = file.stem.split("_")[1]
    if importlib.util.find_spec(upstream) is None:
        pytest.skip(f"{upstream} is not installed")
    needs_emulation()
    noted = file.with_suffix(".txt").read_text()
    shutil.copy(file, tmp_path)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plugin = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p fsdp_doctor.plugin.hooks -c /dev/null"}
    command = noted.splitlines()[0].removeprefix("$ ").split()
    command = [sys.executable if word == "python" else word for word in command]
    done = run(*command, cwd=tmp_path, env={"PYTHONPATH": path, **plugin})
    assert done.left == [], done.left
    assert done.code in (0, 1), done
    if _list_versions(noted) == _list_installed(noted):
        assert _list_failed(done.stdout) == _list_failed(noted), done
        assert _count_passed(done.stdout) == _count_passed(noted), done


@_EACH
def test_a_file_is_short_and_has_its_output_beside_it(file: pathlib.Path) -> None:
    assert sum(bool(line.strip()) for line in file.read_text().splitlines()) <= _LINES
    noted = file.with_suffix(".txt").read_text()
    assert noted.splitlines()[0].endswith(file.name)
    assert _list_failed(noted) or _count_passed(noted)
    assert file.name in (_UPSTREAM / "README.md").read_text()


def _list_failed(output: str) -> list[str]:
    return sorted(re.findall(r"^FAILED \S*?::(\S+)", output, re.MULTILINE))


def _count_passed(output: str) -> int:
    found = re.findall(r"(\d+) passed", output)
    return int(found[-1]) if found else 0


def _list_versions(noted: str) -> dict[str, str]:
    """Reads the last line of a note: ``Python 3.11, torch 2.13.0, accelerate 1.15.0``."""
    pairs = [each.split() for each in noted.splitlines()[-1].split(", ")[1:]]
    return {name: version.partition("+")[0] for name, version in pairs}


def _list_installed(noted: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name).partition("+")[0] for name in _list_versions(noted)}
