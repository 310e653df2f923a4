"""The facts of a report: an allow-list."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from fsdp_doctor.machine.environment import PACKAGES, VARIABLES, home_as_tilde, lines_of, without_torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [*VARIABLES, "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_a_variable_that_changes_torch_or_nccl_is_a_fact(monkeypatch, name):
    monkeypatch.setenv(name, "a value")
    assert without_torch()["variables"][name] == "a value"


@pytest.mark.parametrize(
    "name", ["SECRET_TOKEN", "HF_TOKEN", "USER", "HOSTNAME", "MY_NCCL_DEBUG", "nccl_debug", "NCCL", "PATH"]
)
def test_no_other_variable_is_a_fact(monkeypatch, name):
    monkeypatch.setenv(name, "a value that must stay here")
    assert "a value that must stay here" not in json.dumps(without_torch(host_name=True))
    assert name not in without_torch()["variables"]


def test_the_facts_are_those_of_the_list_and_no_others():
    facts = without_torch()
    assert set(facts) == {"python", "platform", "cpus", "packages", "variables"}
    assert set(facts["packages"]) <= set(PACKAGES)


def test_the_host_name_is_told_only_where_it_was_asked_for():
    assert "host" not in without_torch()
    assert socket.gethostname() not in without_torch()["platform"].split()
    assert without_torch(host_name=True)["host"] == socket.gethostname()


def test_the_home_directory_is_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "/home/someone/topo.xml:/home/someone/more.xml")
    facts = without_torch()
    assert facts["variables"]["PYTORCH_ALLOC_CONF"] == "~/topo.xml:~/more.xml"
    assert "someone" not in json.dumps(facts["variables"])


@pytest.mark.parametrize(
    ("home", "text", "expected"),
    [
        ("/home/someone", "cd /home/someone; ls", "cd ~; ls"),
        ("/home/someone", "/home/else", "/home/else"),
        ("/", "/tmp/x", "/tmp/x"),
    ],
)
def test_only_the_home_directory_becomes_a_tilde(monkeypatch, home, text, expected):
    monkeypatch.setenv("HOME", home)
    assert home_as_tilde(text) == expected


def test_each_fact_is_a_line():
    facts = {"cpus": 4, "packages": {"torch": "2.9", "numpy": "2"}, "accelerators": ["A", "B"]}
    assert lines_of(facts) == ["cpus: 4", "packages:", "  torch: 2.9", "  numpy: 2", "accelerators: A, B"]
    assert lines_of({"accelerators": []}) == ["accelerators: none"]


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
    assert f"torch: cannot be imported: {reason}" in done.stdout
    assert "  NCCL_DEBUG: INFO" in done.stdout.splitlines()
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
