"""The emulated device is built once or installed from a wheel, and starts and ends with its process."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from program import Run, Started, run

emulated: Any = pytest.importorskip("fsdp_doctor.emulated", exc_type=ImportError)
build, EmulationUnavailable = emulated.build, emulated.EmulationUnavailable

_IMPORT = """
try:
    import fsdp_doctor.emulated
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
else:
    import torch
    print(torch.ones(5, device="emulated").sum().item())
"""
_BUILDING = "building the emulated accelerator"


def start(code: str, env: Mapping[str, str] | None = None) -> Started:
    return Started(sys.executable, "-W", "ignore", "-c", code, env=dict(env or {}))


def imported(env: Mapping[str, str]) -> Run:
    return start(_IMPORT, env).wait()


def compiler(directory: pathlib.Path, script: str) -> str:
    """A program that says its version, and otherwise does what ``script`` says."""
    path = directory / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n{script}\n')
    path.chmod(0o755)
    return str(path)


REFUSALS: dict[str, tuple[Callable[[pathlib.Path], dict[str, str]], str]] = {
    "no compiler on the path": (lambda tmp: {"PATH": str(tmp)}, r"there is none \(c\+\+, g\+\+, clang\+\+ not found\)"),
    "a compiler that is missing": (lambda tmp: {"CXX": "no-such-compiler -O2"}, r"CXX=no-such-compiler -O2 not found"),
    "a compiler that does not run": (lambda tmp: {"CXX": "false"}, "the C\\+\\+ compiler false does not run"),
    "a compiler that fails": (
        lambda tmp: {"CXX": compiler(tmp, "echo 'x.cpp:1: error: no good' >&2; exit 1")},
        "could not be built for torch .*: x.cpp:1: error: no good$",
    ),
    "no headers of Python": (
        lambda tmp: {"CXX": compiler(tmp, "echo 'fatal error: Python.h: No such file' >&2; exit 1")},
        "python3-dev",
    ),
}


def build_with(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> str:
    """Returns what the refusal of a build in this environment says."""
    monkeypatch.delenv("CXX", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EmulationUnavailable) as refusal:
        build.find_library()
    return str(refusal.value)


@pytest.mark.parametrize(("env", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_a_build_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    env: Callable[[pathlib.Path], dict[str, str]],
    sentence: str,
) -> None:
    (tmp_path / "bin").mkdir()
    said = build_with(monkeypatch, {"FSDP_DOCTOR_CACHE": str(tmp_path / "cache"), **env(tmp_path / "bin")})
    assert re.search(sentence, said)
    assert len(said.splitlines()) == 1


def test_an_import_without_a_compiler_is_an_import_error(tmp_path: pathlib.Path) -> None:
    done = imported({"FSDP_DOCTOR_CACHE": str(tmp_path), "CXX": str(tmp_path / "nothing")})
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("EmulationUnavailable: the emulated accelerator is built with a C++ compiler")


def test_a_build_that_failed_leaves_nothing_behind_and_is_tried_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        build_with(monkeypatch, {"FSDP_DOCTOR_CACHE": str(tmp_path / "cache"), "CXX": compiler(tmp_path, "exit 1")})
        assert _BUILDING in capfd.readouterr().err
        assert [path.name for path in (tmp_path / "cache").glob("*/*")] == ["lock"]


# What it links is the library that is built already: to compile it takes a minute, and was done for this one.
_LINKER = """
while [ $# -gt 0 ]; do [ "$1" = -o ] && made=$2; shift; done
case "$made" in *.o) : > "$made" ;; *) sleep {seconds}; cp '{library}' "$made" ;; esac
"""


def linker(directory: pathlib.Path, seconds: int = 0) -> str:
    """A compiler that is done in no time, or after that many seconds."""
    return compiler(directory, _LINKER.format(library=build.find_library(), seconds=seconds))


def test_of_many_processes_one_builds_and_all_work(tmp_path: pathlib.Path) -> None:
    # The build takes a while, in which the others come.
    env = {"FSDP_DOCTOR_CACHE": str(tmp_path / "cache"), "CXX": linker(tmp_path, seconds=2)}
    ends = [process.wait() for process in [start(_IMPORT, env) for _ in range(3)]]
    assert [(end.code, end.stdout) for end in ends] == [(0, "5.0\n")] * 3
    assert "".join(end.stderr for end in ends).count(_BUILDING) == 1
    again = imported(env)
    assert (again.stdout, again.stderr) == ("5.0\n", "")
    (library,) = (tmp_path / "cache").glob("*/_C*.so")
    assert {path.name for path in library.parent.iterdir()} == {"lock", library.name}


def _temporary(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


def _under_a_file(tmp_path: pathlib.Path) -> dict[str, str]:
    """A cache that not even root can create."""
    (tmp_path / "file").touch()
    return {"FSDP_DOCTOR_CACHE": str(tmp_path / "file" / "cache"), "CXX": linker(tmp_path)}


def test_without_a_writable_cache_the_library_is_kept_among_the_temporary_files(tmp_path: pathlib.Path) -> None:
    temporary = _temporary(tmp_path)
    env = _under_a_file(tmp_path) | {"TMPDIR": str(temporary)}
    done = imported(env)
    assert (done.code, done.stdout) == (0, "5.0\n"), done.stderr
    (library,) = temporary.glob("*/*/_C*.so")
    building, note = done.stderr.splitlines()
    assert building.startswith(_BUILDING)
    assert str(library.parent) in note
    assert "FSDP_DOCTOR_CACHE" in note
    again = imported(env)
    assert (again.stdout, again.stderr) == ("5.0\n", "")


def test_on_a_full_disk_the_library_is_kept_among_the_temporary_files(tmp_path: pathlib.Path) -> None:
    temporary, cache = _temporary(tmp_path), tmp_path / "cache"
    cache.mkdir()
    env = {"FSDP_DOCTOR_CACHE": str(cache), "CXX": linker(tmp_path), "TMPDIR": str(temporary)}
    # A file system of its own for these processes, too small for the library.
    full = (
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=64k none "{cache}" && exec "$@"',
    )
    if Started(*full, "sh", "true").wait().code != 0:
        pytest.skip("no file system can be mounted here")
    done = Started(*full, "sh", sys.executable, "-W", "ignore", "-c", _IMPORT, env=env).wait()
    assert (done.code, done.stdout) == (0, "5.0\n"), done.stderr
    (library,) = temporary.glob("*/*/_C*.so")
    assert str(library.parent) in done.stderr.splitlines()[-1]


def test_without_any_place_for_the_library_both_are_named_in_one_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _temporary(tmp_path) / f"fsdp-doctor-{os.getuid()}"
    env = _under_a_file(tmp_path)
    monkeypatch.setattr(build.tempfile, "tempdir", str(place.parent))
    place.touch()
    assert re.search(r"file/cache.*: Not a directory, nor to .*File exists", build_with(monkeypatch, env))
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    assert re.search(r"file/cache.*: Not a directory, nor to .*other users can write", build_with(monkeypatch, env))


def test_a_torch_that_is_too_old_is_refused_but_no_oldest_nightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_find_installed", lambda: pathlib.Path("built"))
    for version in ("2.9.1", "2.9.0+cu128", "1.13.1"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(EmulationUnavailable, match=r"needs torch 2\.10 or newer, this is torch"):
            build.find_library()
    for version in ("2.10.0", "2.10.0a0+git1234", "2.13.1+cu130", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        assert build.find_library() == pathlib.Path("built")


def test_the_cache_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for cache, xdg, directory in (
        ("/a", "/b", "/a"),
        ("", "/b", "/b/fsdp-doctor"),
        ("", "", "/home/someone/.cache/fsdp-doctor"),
    ):
        monkeypatch.setenv("FSDP_DOCTOR_CACHE", cache)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert build.cache_directory() == pathlib.Path(directory)


def test_another_torch_compiler_or_flag_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    command = build._find_compiler()
    before = build._compute_key(command)
    assert build._compute_key(command) == before
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "2.99.0")
        assert build._compute_key(command) != before
    monkeypatch.setattr(build, "_list_flags", lambda: ["-O3"])
    assert build._compute_key(command) != before


def test_every_source_is_compiled_once() -> None:
    named = [name for unit in build._list_units() for name in unit]
    assert sorted(named) == sorted(source.stem for source in build._SOURCES.glob("*.cpp"))


# A wheel of the built library


def test_a_machine_without_a_compiler_uses_the_wheel(tmp_path: pathlib.Path) -> None:
    command = run(sys.executable, "-m", "fsdp_doctor.emulated.build", "--wheel", str(tmp_path / "dist"))
    assert (command.code, command.stderr) == (0, "")
    wheel = pathlib.Path(command.stdout.strip())
    with zipfile.ZipFile(wheel) as files:
        information = next(name for name in files.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: torch==" in files.read(information).decode()
        record = files.read(information.replace("METADATA", "RECORD")).decode()
        assert [line.split(",")[0] for line in record.splitlines()] == files.namelist()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path))
    assert run(*pip, str(wheel)).code == 0
    without = {"CXX": str(tmp_path / "no-compiler"), "FSDP_DOCTOR_CACHE": str(tmp_path / "cache")}
    assert start(f"import sys; sys.path.append({str(tmp_path)!r})\n{_IMPORT}", without).wait().stdout == "5.0\n"
    assert not (tmp_path / "cache").exists()
