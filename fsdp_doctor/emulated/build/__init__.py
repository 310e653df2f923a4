"""Builds the device's library with the machine's C++ compiler, once for each torch and each source."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from packaging.version import Version

_Result = TypeVar("_Result")

OLDEST_TORCH = "2.10"
_SOURCES = pathlib.Path(__file__).parents[1] / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
_FILE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
_LIBRARIES = ("c10", "torch_cpu", "torch_python")
# Sources that need the same large headers are compiled as one: reading those headers is most of the time. The largest
# first; a source that is not named here is compiled alone.
_TOGETHER = (
    ("collectives", "agreement", "gloo", "module"),
    ("autocast", "attention", "copy", "cuda_kernels", "device", "fallback", "sparse"),
)


class EmulationUnavailable(ImportError):
    """The device cannot be built here; the message is one sentence that says why and what helps."""


def library() -> pathlib.Path:
    """The shared library for this torch: the one that is installed, else built if it is not in the cache yet.

    Any number of processes may call it at once: one builds, the others wait for it. Where the cache cannot be written
    or is full, the library is kept in the directory of temporary files. Raises EmulationUnavailable.
    """
    _check_torch()
    if installed := _installed():
        return installed
    compiler = _compiler()
    key = _key(compiler)
    cached = cache_directory() / key / _FILE
    if os.path.exists(cached):
        return cached
    with _in_a_place(key, lambda directory: open(directory / "lock", "w")) as lock:
        # The kernel unlocks it when this process ends, however that is.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _kept(key) or _build(compiler, key)


# The distribution of a library that is built already, and the package in it.
PREBUILT = "fsdp_doctor_emulated_prebuilt"


def prebuilt_name() -> str:
    """The file of the library in ``PREBUILT``: other sources, another torch or Python have another name."""
    digest = hashlib.sha256(f"{torch.version.git_version} {torch.compiled_with_cxx11_abi()}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"_C_{digest.hexdigest()[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _installed() -> pathlib.Path | None:
    package = importlib.util.find_spec(PREBUILT)
    if package is None or package.origin is None:
        return None
    file = pathlib.Path(package.origin).with_name(prebuilt_name())
    return file if file.exists() else None


def cache_directory() -> pathlib.Path:
    """``$FSDP_DOCTOR_CACHE``, else ``fsdp-doctor`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("FSDP_DOCTOR_CACHE")
    if own:
        return pathlib.Path(own)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fsdp-doctor"


def _temporary_directory() -> pathlib.Path:
    """For a library that the cache has no room for. Raises OSError where another user could put a library there."""
    directory = pathlib.Path(tempfile.gettempdir()) / f"fsdp-doctor-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users can write to it", str(directory))
    return directory


_PLACES = (cache_directory, _temporary_directory)


def _in_a_place(key: str, act: Callable[[pathlib.Path], _Result]) -> _Result:
    """What ``act`` returns for the first directory that it can use, of those where the library may be kept."""
    reasons = []
    for place in _PLACES:
        named = "the directory of temporary files"
        try:
            directory = place() / key
            named = str(directory)
            directory.mkdir(parents=True, exist_ok=True)
            return act(directory)
        except OSError as error:
            reasons.append(f"{named}: {error.strerror or error}")
    raise EmulationUnavailable(
        f"the emulated accelerator cannot be kept in {', nor in '.join(reasons)}; set FSDP_DOCTOR_CACHE"
    )


def _kept(key: str) -> pathlib.Path | None:
    for place in _PLACES:
        with contextlib.suppress(OSError):
            file = place() / key / _FILE
            if file.exists():
                return file
    return None


def _check_torch() -> None:
    # The release alone: a nightly or a vendor's pre-release of 2.10 has what 2.10 has.
    if Version(torch.__version__).release < Version(OLDEST_TORCH).release:
        raise EmulationUnavailable(
            f"the emulated accelerator needs torch {OLDEST_TORCH} or newer, this is torch {torch.__version__}"
        )


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [[name] for name in _COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise EmulationUnavailable(
        f"the emulated accelerator is built with a C++ compiler, and there is none "
        f"({f'CXX={named}' if named else ', '.join(_COMPILERS)} not found); install one (Debian: apt install g++)"
    )


def _flags() -> list[str]:
    include = pathlib.Path(torch.__file__).parent / "include"
    directories = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        "-DTORCH_EXTENSION_NAME=_C",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{directory}" for directory in directories),
    ]


def _key(compiler: list[str]) -> str:
    """A name that changes with all that the library depends on."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmulationUnavailable(f"the C++ compiler {compiler[0]} does not run: {error}") from None
    digest = hashlib.sha256()
    for part in (torch.__version__, str(torch.version.git_version), sys.version, version, *_flags()):
        digest.update(part.encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"emulated-torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _build(compiler: list[str], key: str) -> pathlib.Path:
    print(  # noqa: T201, half a minute without a word would look like a hang
        f"building the emulated accelerator for torch {torch.__version__}, once", file=sys.stderr, flush=True
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            file = _in_a_place(key, functools.partial(_keep, _compile(compiler, pathlib.Path(scratch))))
    except OSError as error:
        reason = error.strerror or error
        raise EmulationUnavailable(
            f"the emulated accelerator could not be built among the temporary files: {reason}; set TMPDIR"
        ) from None
    if cache_directory() not in file.parents:
        print(  # noqa: T201, with the temporary files it will be gone, and the next build takes as long
            f"{cache_directory()} cannot be written or is full, so the emulated accelerator is kept in {file.parent}; "
            "set FSDP_DOCTOR_CACHE to another directory",
            file=sys.stderr,
            flush=True,
        )
    return file


def _compile(compiler: list[str], scratch: pathlib.Path) -> pathlib.Path:
    """Makes the library in ``scratch``. Raises OSError where there is no room, EmulationUnavailable."""
    sources = [_source(unit, scratch) for unit in _units()]
    objects = [source.with_suffix(".o") for source in sources]
    commands = [
        [*compiler, *_flags(), "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    linked = scratch / _FILE
    named = [f"-l{name}" for name in _LIBRARIES]
    _run([*compiler, "-shared", *map(str, objects), "-o", str(linked), f"-L{libraries}", *named])
    return linked


def _keep(linked: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Copies the library into ``directory``, in which no process ever sees a part of it. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=directory) as beside:
        return pathlib.Path(shutil.copy(linked, beside)).rename(directory / _FILE)


def _units() -> list[tuple[str, ...]]:
    """The names of the sources that one run of the compiler takes, each."""
    together = {name for unit in _TOGETHER for name in unit}
    return [*_TOGETHER, *((path.stem,) for path in sorted(_SOURCES.glob("*.cpp")) if path.stem not in together)]


def _source(unit: tuple[str, ...], directory: pathlib.Path) -> pathlib.Path:
    """A file in ``directory`` that includes the sources of ``unit``."""
    path = directory / f"{unit[0]}.cpp"
    path.write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in unit))
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:] or ["?"]
    hint = "; install Python's headers (Debian: apt install python3-dev)" if "Python.h" in errors[0] else ""
    raise EmulationUnavailable(
        f"the emulated accelerator could not be built for torch {torch.__version__}: {errors[0].strip()}{hint}"
    )
