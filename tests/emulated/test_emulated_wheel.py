"""The built library as a wheel: installed, it needs no compiler."""

from __future__ import annotations

import pathlib
import sys
import zipfile

import pytest
from program import Started, run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped, and which builds it

_IMPORT = "import torch, fsdp_doctor.emulated; print(torch.ones(2, device='emulated').sum().item())"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Packed by the command, from the library that is built."""
    directory = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "fsdp_doctor.emulated.build", "--wheel", str(directory))
    assert (built.code, built.stderr) == (0, "")
    return pathlib.Path(built.stdout.strip())


def test_a_machine_without_a_compiler_uses_the_wheel(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path))
    assert run(*pip, str(wheel)).code == 0
    without = {"CXX": str(tmp_path / "no-compiler"), "FSDP_DOCTOR_CACHE": str(tmp_path / "cache")}
    install = f"import sys; sys.path.append({str(tmp_path)!r}); "
    ends = [Started(sys.executable, "-c", code, env=without) for code in (install + _IMPORT, _IMPORT)]
    installed, bare = [each.wait() for each in ends]
    assert installed.stdout == "2.0\n"
    assert "is built with a C++ compiler" in bare.stderr
    assert not (tmp_path / "cache").exists()


def test_a_wheel_names_its_torch_and_lists_its_files(wheel: pathlib.Path) -> None:
    assert wheel.suffix == ".whl"
    with zipfile.ZipFile(wheel) as files:
        information = next(name for name in files.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: torch==" in files.read(information).decode()
        record = files.read(information.replace("METADATA", "RECORD")).decode()
        assert [line.split(",")[0] for line in record.splitlines()] == files.namelist()
