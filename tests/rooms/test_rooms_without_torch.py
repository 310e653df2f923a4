"""The rooms that the command line imports before it runs anything do not import torch."""

from __future__ import annotations

import sys

from program import ROOT, run

ROOMS = (
    *("errors", "machine", "matrix", "ledgers", "verdict", "known", "report", "versions", "page"),
    *("explain", "check", "repro", "bundle", "cli"),
)
_IMPORT_EACH = """
import importlib, sys

sys.modules["torch"] = None  # so that importing it raises ImportError
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(module, error)
print(len(sys.argv) - 1)
"""


def _modules(room: str) -> list[str]:
    files = [ROOT / "fsdp_doctor" / f"{room}.py", *(ROOT / "fsdp_doctor" / room).rglob("*.py")]
    found = [file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in files if file.exists()]
    return [module.removesuffix(".__init__") for module in found]


def test_every_module_of_them_can_be_imported_without_torch() -> None:
    modules = [module for room in ROOMS for module in _modules(room)]
    done = run(sys.executable, "-c", _IMPORT_EACH, *modules)
    assert (done.stdout, done.stderr) == (f"{len(modules)}\n", "")
    assert len(modules) > 50
