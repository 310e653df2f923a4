"""``fsdp-doctor env`` works where torch does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from support.places import ROOT

pytestmark = pytest.mark.processes


def env(tmp_path, torch, *options):
    """Runs the command with a package of the name torch that holds the given code."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(torch)
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)]),
        "HOME": str(tmp_path),
        "SECRET_TOKEN": "must stay here",
        "NCCL_DEBUG": "INFO",
    }
    command = [sys.executable, "-m", "fsdp_doctor", "env", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, cwd=tmp_path)


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "ImportError: libcudart.so.12: cannot",
        ),
        ("import os; os._exit(7)", "exit code 7"),
        ("", "AttributeError: module 'torch' has no attribute '__version__'"),
        ("raise ImportError('broken in ' + __file__)", "ImportError: broken in ~/packages/torch/__init__.py"),
    ],
)
def test_env_works_where_torch_cannot_be_imported_and_says_why(tmp_path, torch, reason):
    done = env(tmp_path, torch)
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"PyTorch version: cannot be imported: {reason}" in done.stdout
    assert "NCCL_DEBUG=INFO" in done.stdout.splitlines()
    assert "must stay here" not in done.stdout
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize("options", [[], ["--host-name"]])
def test_env_as_json_has_the_same_facts(tmp_path, options):
    done = env(tmp_path, "raise ImportError('no libcudart')", "--json", *options)
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert facts["torch"] == "cannot be imported: ImportError: no libcudart"
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert facts.get("host") == (socket.gethostname() if options else None)


def test_env_imports_torch_in_a_process_of_its_own(tmp_path):
    done = env(tmp_path, "import os; open('pid', 'a').write(f'{os.getpid()} {os.getppid()}\\n'); raise ImportError")
    assert done.returncode == 0
    [line] = (tmp_path / "pid").read_text().splitlines()
    assert line.split()[1] != str(os.getpid())
