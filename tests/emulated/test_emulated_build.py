"""The emulated device builds itself once, says in a sentence why it cannot, and takes its place in torch."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program import Started

emulated: Any = pytest.importorskip("fsdp_doctor.emulated", exc_type=ImportError)
build, EmulationUnavailable = emulated.build, emulated.EmulationUnavailable


def python(code: str, env: dict[str, str] | None = None) -> Started:
    return Started(sys.executable, "-W", "ignore", "-c", code, env=env)


def run(code: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = python(code, env=env).wait()
    return done.code, done.stdout, done.stderr


def test_the_host_cache_can_be_emptied() -> None:
    code = (
        "import torch, fsdp_doctor.emulated; x = torch.ones(3, device='emulated'); torch.accelerator.empty_host_cache()"
    )
    assert run(code)[0] == 0


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
    "a compiler that fails without a word": (
        lambda tmp: {"CXX": compiler(tmp, "exit 1")},
        "could not be built for torch",
    ),
    "no headers of Python": (
        lambda tmp: {"CXX": compiler(tmp, "echo 'fatal error: Python.h: No such file' >&2; exit 1")},
        "python3-dev",
    ),
}


def build_with(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> str:
    """What the refusal of a build in this environment says."""
    monkeypatch.delenv("CXX", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EmulationUnavailable) as refusal:
        build.library()
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


@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_an_import_without_a_compiler_is_an_import_error(tmp_path: pathlib.Path, variable: str) -> None:
    env = {"FSDP_DOCTOR_CACHE": str(tmp_path), "CXX": "", variable: str(tmp_path / "nothing")}
    code, stdout, stderr = run(_IMPORT, env)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"EmulationUnavailable: the emulated accelerator is built with a C\+\+ compiler.*\n", stdout)


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
    return compiler(directory, _LINKER.format(library=build.library(), seconds=seconds))


@pytest.fixture(scope="module")
def built_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[tuple[int, str, str]]]:
    """The environment of an empty cache, and what four processes that wanted it at once said."""
    # After a while, in which the others come.
    program = linker(tmp_path_factory.mktemp("bin"), seconds=2)
    env = {"FSDP_DOCTOR_CACHE": str(tmp_path_factory.mktemp("cache")), "CXX": program}
    ends = [process.wait() for process in [python(_IMPORT, env=env) for _ in range(4)]]
    return env, [(end.code, end.stdout, end.stderr) for end in ends]


def test_of_many_processes_one_builds_and_all_work(built_at_once: tuple[Any, list[tuple[int, str, str]]]) -> None:
    _, ends = built_at_once
    assert [(code, stdout) for code, stdout, _ in ends] == [(0, "5.0\n")] * 4
    assert "".join(stderr for _, _, stderr in ends).count(_BUILDING) == 1


def test_a_library_that_is_built_is_used_without_a_word(built_at_once: tuple[dict[str, str], Any]) -> None:
    env, _ = built_at_once
    cache = pathlib.Path(env["FSDP_DOCTOR_CACHE"])
    assert run(_IMPORT, env) == (0, "5.0\n", "")
    assert len(list(cache.glob("*/_C*.so"))) == 1
    assert {path.name for path in cache.glob("*/*")} == {"lock", next(cache.glob("*/_C*.so")).name}


def _temporary(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


def _under_a_file(tmp_path: pathlib.Path) -> dict[str, str]:
    """A cache that not even root can make."""
    (tmp_path / "file").touch()
    return {"FSDP_DOCTOR_CACHE": str(tmp_path / "file" / "cache"), "CXX": linker(tmp_path)}


def test_without_a_cache_that_can_be_written_the_library_is_kept_among_the_temporary_files(
    tmp_path: pathlib.Path,
) -> None:
    temporary = _temporary(tmp_path)
    env = _under_a_file(tmp_path) | {"TMPDIR": str(temporary)}
    code, stdout, stderr = run(_IMPORT, env)
    assert (code, stdout) == (0, "5.0\n"), stderr
    (library,) = temporary.glob("*/*/_C*.so")
    building, said = stderr.splitlines()
    assert building.startswith(_BUILDING)
    assert str(library.parent) in said
    assert "FSDP_DOCTOR_CACHE" in said
    assert run(_IMPORT, env) == (0, "5.0\n", "")


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


@pytest.mark.parametrize(
    ("kind", "reason"), [("a file", "File exists"), ("open to all", "other users can write to it")]
)
def test_without_any_place_for_the_library_both_are_named_in_one_sentence(
    tmp_path: pathlib.Path, kind: str, reason: str
) -> None:
    place = _temporary(tmp_path) / f"fsdp-doctor-{os.getuid()}"
    if kind == "a file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    env = _under_a_file(tmp_path) | {"TMPDIR": str(place.parent)}
    code, stdout, stderr = run(_IMPORT, env)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(rf"EmulationUnavailable: .*{env['FSDP_DOCTOR_CACHE']}.*: Not a directory.*{reason}.*\n", stdout)


@pytest.mark.parametrize("version", ["2.9.1", "2.9.0+cu128", "2.6.0", "1.13.1"])
def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(EmulationUnavailable, match=r"needs torch 2\.10 or newer, this is torch") as refusal:
        build._check_torch()
    assert isinstance(refusal.value, ImportError)


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234", "2.13.1+cu130", "3.0.0"])
def test_a_newer_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    build._check_torch()


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"FSDP_DOCTOR_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fsdp-doctor"),
        ({"FSDP_DOCTOR_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/fsdp-doctor"),
        ({}, "/home/someone/.cache/fsdp-doctor"),
    ],
)
def test_the_cache_is_where_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], directory: str
) -> None:
    for name in ("FSDP_DOCTOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert build.cache_directory() == pathlib.Path(directory)


def test_another_torch_compiler_or_flag_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    command = build._compiler()
    before = build._key(command)
    assert build._key(command) == before
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "2.99.0")
        assert build._key(command) != before
    monkeypatch.setattr(build, "_flags", lambda: ["-O3"])
    assert build._key(command) != before


def test_every_source_is_compiled_once() -> None:
    named = [name for unit in build._units() for name in unit]
    assert sorted(named) == sorted(source.stem for source in build._SOURCES.glob("*.cpp"))


_BACKWARD = """
import torch, fsdp_doctor.emulated
model = torch.nn.Linear(4, 4, device="emulated")
model(torch.ones(2, 4, device="emulated")).sum().backward()
"""


def test_a_program_may_end_right_after_a_backward() -> None:
    ends = [process.wait() for process in [python(_BACKWARD) for _ in range(4)]]
    assert [(end.code, end.stderr) for end in ends] == [(0, "")] * 4


def test_there_are_as_many_devices_as_ranks_on_the_host() -> None:
    code = "import torch, fsdp_doctor.emulated; print(torch.accelerator.device_count())"
    assert run(code, {"LOCAL_WORLD_SIZE": "12"})[:2] == (0, "12\n")


def test_a_device_of_another_name_in_its_place_is_said() -> None:
    assert run("import torch; torch.utils.rename_privateuse1_backend('other')" + _IMPORT)[:2] == (
        0,
        "EmulationUnavailable: torch has room for one device of this kind, and other has taken it\n",
    )
