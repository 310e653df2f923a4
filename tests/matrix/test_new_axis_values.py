"""A value that is added to an axis, and that nothing handles, is an error of mypy."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from fsdp_doctor.matrix import axes
from fsdp_doctor.matrix.axes import AxisValue

pytestmark = pytest.mark.processes

_ROOT = pathlib.Path(__file__).parents[2]


def test_a_value_added_to_any_axis_does_not_pass_mypy(tmp_path: pathlib.Path) -> None:
    """Every enum gets one more member in a copy of the package; mypy must name each of them where it is not handled."""
    copy = tmp_path / "fsdp_doctor"
    shutil.copytree(_ROOT / "fsdp_doctor", copy, ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    if (_ROOT / ".mypy_cache").is_dir():  # what mypy knows of torch need not be found out again
        shutil.copytree(_ROOT / ".mypy_cache", tmp_path / ".mypy_cache", copy_function=os.link)
    source = (copy / "matrix" / "axes.py").read_text()
    enums = {kind.__name__ for kind in vars(axes).values() if _is_axis(kind)}
    for name in enums:
        source, count = re.subn(
            rf'(class {name}\(AxisValue\):\n    """.*?"""\n\n)', r'\1    ADDED = "added"\n', source, flags=re.DOTALL
        )
        assert count == 1, name
    (copy / "matrix" / "axes.py").write_text(source)
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy", "fsdp_doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert {
        name for name in enums if f"{name}.ADDED]" in mypy.stdout or f'"{name}"; expected "Never"' in mypy.stdout
    } == enums


def _is_axis(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, AxisValue) and kind is not AxisValue
