"""Runs a program in which the chosen modules, which are written for CUDA, use the emulated device.

    python -m fsdp_doctor.emulated.in_place_of_cuda --in accelerate,tests python -m pytest tests/fsdp/test_fsdp.py

``--in`` names packages, parts of packages (``accelerate.utils``) and directories. In every Python process of the
program, their modules are loaded with CUDA replaced by the emulated device, and NCCL by the backend ``emulated``.
torch, all other packages, and files that run as scripts instead of imported modules are not changed. pytest runs
without its rewriting of assertions, because the rewriting would load the tests itself.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType

_PLACES = "FSDP_DOCTOR_EMULATED_IN"
_DEVICES = "FSDP_DOCTOR_EMULATED_DEVICES"

SUBSTITUTIONS = (
    (r"\btorch\.cuda\b(?!\.nccl)", "torch.emulated"),
    (r"\.cuda\(", ".emulated("),
    (r"\bis_cuda\b", "is_emulated"),
    (r"(?<![\w.])cuda(?!\w)", "emulated"),
    (r"""(?<=["':])nccl(?=["',])""", "emulated"),
)


def install(
    is_meant: Callable[[str, pathlib.Path], bool], substitutions: Sequence[tuple[str, str]] = SUBSTITUTIONS
) -> None:
    """Applies ``substitutions`` to the source of every module for whose name and file ``is_meant`` returns true.

    A substitution is a pair of a regular expression and its replacement. Line numbers do not change. Modules that are
    already imported are not affected.
    """
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in substitutions]

    class _Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            source = pathlib.Path(self.path).read_text()
            for pattern, replacement in patterns:
                source = pattern.sub(replacement, source)
            code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
            return code

    class _Finder:
        @staticmethod
        def find_spec(
            name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
                return None
            if not is_meant(name, pathlib.Path(spec.origin)):
                return None
            spec.loader = _Loader(name, spec.origin)
            return spec

    sys.meta_path.insert(0, _Finder)


def install_from_environment() -> None:
    """Installs the substitutions when a Python process of the program starts."""
    from fsdp_doctor.emulated.library import _C

    places = os.environ[_PLACES].split(os.pathsep)
    _C.set_device_count(int(os.environ[_DEVICES]))

    def is_in(place: str, name: str, file: pathlib.Path) -> bool:
        return f"{name}.".startswith(f"{place}.") or pathlib.Path(place) in (file, *file.parents)

    install(lambda name, file: any(is_in(place, name, file) for place in places))


def main() -> int:
    """Runs the program, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_doctor.emulated.in_place_of_cuda")
    parser.add_argument("--in", required=True, dest="places", metavar="NAMES", help="packages and paths, by commas")
    parser.add_argument("--devices", type=int, default=2, metavar="NUMBER", help="how many devices there are (2)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    options = parser.parse_args()
    places = [os.path.abspath(place) if os.path.exists(place) else place for place in options.places.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "sitecustomize.py").write_text(
            "from fsdp_doctor.emulated import in_place_of_cuda\nin_place_of_cuda.install_from_environment()\n"
        )
        root = str(pathlib.Path(__file__).parents[2])
        environment = os.environ | {
            _PLACES: os.pathsep.join(places),
            _DEVICES: str(options.devices),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTEST_ADDOPTS": f"--assert=plain {os.environ.get('PYTEST_ADDOPTS', '')}",
            "PYTHONPATH": os.pathsep.join([directory, root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        return subprocess.run(options.program, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
