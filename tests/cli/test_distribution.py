"""The package as an index has it: built, and installed into an environment that has nothing else of this checkout."""

from __future__ import annotations

import email.message
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import tarfile

import pytest
from program import Run, run
from support.places import ROOT

import fsdp_doctor

_SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
_LOG = ROOT / "examples" / "verl-5995" / "log.txt"
_OF_THE_CHECKOUT = {"PYTHONPATH": ""}


def _build(kind: str, tree: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Builds as ``python -m build --no-isolation`` does: no network is needed."""
    code = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(directory)!r}))"
    done = run(sys.executable, "-c", code, cwd=tree, env=_OF_THE_CHECKOUT)
    assert done.code == 0, done.stderr
    return directory / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Environment with the wheel that is built from the source distribution, and this one's other packages."""
    directory = tmp_path_factory.mktemp("distribution")
    tree = directory / "tree"
    shutil.copytree(ROOT / "fsdp_doctor", tree / "fsdp_doctor", ignore=shutil.ignore_patterns("__pycache__"))
    for name in _SOURCES:
        shutil.copy(ROOT / name, tree / name)
    sources = _build("sdist", tree, directory)
    with tarfile.open(sources) as archive:
        archive.extractall(directory / "unpacked", filter="data")
    wheel = _build("wheel", directory / "unpacked" / sources.name.removesuffix(".tar.gz"), directory)
    environment = directory / "environment"
    assert run(sys.executable, "-m", "venv", "--without-pip", str(environment)).code == 0
    pip = (sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-deps")
    done = run(*pip, "--quiet", "--no-index", str(wheel), env=_OF_THE_CHECKOUT)
    assert done.code == 0, done.stderr
    # The directory alone: the .pth file in it that leads to a checkout is not read.
    (_packages(environment) / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return environment


def _packages(environment: pathlib.Path) -> pathlib.Path:
    return next(environment.glob("lib/python*/site-packages"))


def _doctor(environment: pathlib.Path, *arguments: str) -> Run:
    """The installed command, started where no checkout is."""
    return run(str(environment / "bin" / "fsdp-doctor"), *arguments, env=_OF_THE_CHECKOUT, cwd=environment)


def _metadata(environment: pathlib.Path) -> email.message.Message:
    (information,) = _packages(environment).glob("fsdp_doctor-*.dist-info")
    return importlib.metadata.Distribution.at(information).metadata  # type: ignore[return-value]


def test_every_file_of_the_package_is_installed(environment: pathlib.Path) -> None:
    def files(directory: pathlib.Path) -> set[str]:
        found = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(directory)) for path in found}

    assert files(_packages(environment) / "fsdp_doctor") == files(ROOT / "fsdp_doctor")


def test_the_installed_command_says_its_version(environment: pathlib.Path) -> None:
    done = _doctor(environment, "--version")
    assert (done.code, done.stdout.split()) == (0, ["fsdp-doctor", fsdp_doctor.__version__]), done.stderr
    assert _metadata(environment)["Version"] == fsdp_doctor.__version__


def test_the_installed_command_explains_a_log_from_its_catalogue(environment: pathlib.Path) -> None:
    done = _doctor(environment, "explain", str(_LOG), "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["matches"]


def test_the_readme_of_an_index_has_no_link_into_a_checkout(environment: pathlib.Path) -> None:
    readme = _metadata(environment).get_payload()
    assert isinstance(readme, str)
    assert readme.startswith("# fsdp-doctor")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()))
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("way", ["by its name", "by its path"])
def test_torchrun_starts_the_installed_command(environment: pathlib.Path, way: str) -> None:
    """The name alone suffices only where torchrun is told that it is no file for Python, as PET_NO_PYTHON does."""
    programs = environment / "bin"
    variables = {"PET_NO_PYTHON": "1", "PATH": f"{programs}:{os.environ['PATH']}"} if way == "by its name" else {}
    named = "fsdp-doctor" if way == "by its name" else str(programs / "fsdp-doctor")
    command = (str(programs / "python"), "-m", "torch.distributed.run", "--nproc-per-node=2", named, "--version")
    done = run(*command, env=_OF_THE_CHECKOUT | variables, cwd=environment)
    assert (done.code, done.stdout.split()) == (0, ["fsdp-doctor", fsdp_doctor.__version__]), done.stderr
