"""The built library as a wheel: installed, it needs no compiler."""

from __future__ import annotations

import pathlib
import sys
import zipfile

from program import run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped

_IMPORT = "import torch, fsdp_doctor.emulated; print(torch.ones(2, device='emulated').sum().item())"


def test_a_machine_without_a_compiler_uses_the_wheel(tmp_path: pathlib.Path) -> None:
    built = run(sys.executable, "-m", "fsdp_doctor.emulated.build", "--wheel", str(tmp_path / "dist"))
    wheel = pathlib.Path(built.stdout.strip())
    assert (built.code, wheel.suffix) == (0, ".whl"), built.stderr
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path))
    assert run(*pip, str(wheel)).code == 0
    without = {"CXX": str(tmp_path / "no-compiler"), "FSDP_DOCTOR_CACHE": str(tmp_path / "cache")}
    install = f"import sys; sys.path.append({str(tmp_path)!r}); "
    assert run(sys.executable, "-c", install + _IMPORT, env=without).stdout == "2.0\n"
    assert "is built with a C++ compiler" in run(sys.executable, "-c", _IMPORT, env=without).stderr


def test_a_wheel_names_its_torch_and_lists_its_files(tmp_path: pathlib.Path) -> None:
    built = run(sys.executable, "-m", "fsdp_doctor.emulated.build", "--wheel", str(tmp_path))
    with zipfile.ZipFile(built.stdout.strip()) as wheel:
        information = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: torch==" in wheel.read(information).decode()
        record = wheel.read(information.replace("METADATA", "RECORD")).decode()
        assert [line.split(",")[0] for line in record.splitlines()] == wheel.namelist()
