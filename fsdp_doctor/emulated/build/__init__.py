"""Builds the device's library with the machine's C++ compiler, once for each version of torch and of the sources."""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
# The name of the distribution that contains a prebuilt library, and of the package in it.
PREBUILT = "fsdp_doctor_emulated_prebuilt"
_SOURCES = pathlib.Path(__file__).parents[1] / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
_FILE = f"_C{_SUFFIX}"
_LIBRARIES = ("c10", "torch_cpu", "torch_python")
# The sum of the time of all compilers, which is half a minute on two idle cores.
_BUILD_SECONDS = 60
# Most of the time is spent on torch's large headers. Therefore sources that need the same headers are compiled as one
# unit, the largest unit first. A source that is not listed here is compiled alone.
_UNITS = (
    ("collectives", "agreement", "gloo", "module"),
    ("autocast", "attention", "copy", "cuda_kernels", "device", "fallback", "sparse"),
)


class EmulationUnavailable(ImportError):
    """Error for a device that cannot be built here. The message is one sentence with the reason and a remedy."""


def find_library() -> pathlib.Path:
    """Finds the shared library for this torch: an installed one, else one from the cache, else one that is built now.

    Any number of processes may call it at once: one builds, and the others wait. If the cache cannot be written or is
    full, the library is kept in the directory for temporary files. Raises EmulationUnavailable if there is no library
    and none can be built.
    """
    # Only release numbers are compared, so that nightly and vendors' pre-releases of the oldest version are accepted.
    if Version(torch.__version__).release < Version(OLDEST_TORCH).release:
        raise EmulationUnavailable(
            f"the emulated accelerator needs torch {OLDEST_TORCH} or newer, this is torch {torch.__version__}"
        )
    if installed := _find_installed():
        return installed
    compiler = _find_compiler()
    key = _compute_key(compiler)
    cached = cache_directory() / key / _FILE
    # pathlib's exists is not used, because it raises for a directory that cannot be read.
    if os.path.exists(cached):
        return cached
    with _use_writable_directory(key, lambda directory: open(directory / "lock", "w")) as lock:
        # The kernel releases the lock when this process ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _find_built(key) or _build(compiler, key)


def make_prebuilt_name() -> str:
    """Makes the file name of the library in ``PREBUILT``, which depends on the sources, torch and Python."""
    digest = hashlib.sha256(f"{torch.version.git_version} {torch.compiled_with_cxx11_abi()}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"_C_{digest.hexdigest()[:16]}{_SUFFIX}"


def _find_installed() -> pathlib.Path | None:
    package = importlib.util.find_spec(PREBUILT)
    if package is None or package.origin is None:
        return None
    file = pathlib.Path(package.origin).with_name(make_prebuilt_name())
    return file if file.exists() else None


def cache_directory() -> pathlib.Path:
    """Returns ``$FSDP_DOCTOR_CACHE``, or else ``fsdp-doctor`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if configured := os.environ.get("FSDP_DOCTOR_CACHE"):
        return pathlib.Path(configured)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fsdp-doctor"


def _make_temporary_directory() -> pathlib.Path:
    """Makes the directory that is used if the cache cannot be used.

    Raises OSError if another user could put a library there.
    """
    directory = pathlib.Path(tempfile.gettempdir()) / f"fsdp-doctor-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users can write to it", str(directory))
    return directory


def _use_writable_directory(key: str, use: Callable[[pathlib.Path], _Result]) -> _Result:
    """Returns the result of ``use`` for the cache; if it raises OSError, for the temporary directory."""
    reasons = []
    for place in (cache_directory, _make_temporary_directory):
        name = "the directory of temporary files"
        try:
            directory = place() / key
            name = str(directory)
            directory.mkdir(parents=True, exist_ok=True)
            return use(directory)
        except OSError as error:
            reasons.append(f"{name}: {error.strerror or error}")
    raise EmulationUnavailable(
        f"the library of the emulated accelerator cannot be written to {', nor to '.join(reasons)}; set "
        "FSDP_DOCTOR_CACHE to a directory that can be written to"
    )


def _find_built(key: str) -> pathlib.Path | None:
    for place in (cache_directory, _make_temporary_directory):
        with contextlib.suppress(OSError):
            file = place() / key / _FILE
            if file.exists():
                return file
    return None


def _find_compiler() -> list[str]:
    configured = os.environ.get("CXX")
    candidates = [shlex.split(configured)] if configured else [[name] for name in _COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    missing = f"CXX={configured}" if configured else ", ".join(_COMPILERS)
    raise EmulationUnavailable(
        f"the emulated accelerator is built with a C++ compiler, but there is none ({missing} not found); install "
        "a compiler (Debian: apt install g++)"
    )


def _list_flags() -> list[str]:
    include = pathlib.Path(torch.__file__).parent / "include"
    directories = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [
        # NDEBUG must be defined because torch was built with it, and members of some of its classes depend on it.
        *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w", "-DTORCH_EXTENSION_NAME=_C"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{directory}" for directory in directories),
    ]


def _compute_key(compiler: list[str]) -> str:
    """Computes a directory name that changes with every input on which the library depends."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmulationUnavailable(f"the C++ compiler {compiler[0]} does not run: {error}") from None
    digest = hashlib.sha256()
    for part in (torch.__version__, str(torch.version.git_version), sys.version, version, *_list_flags()):
        digest.update(part.encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"emulated-torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _build(compiler: list[str], key: str) -> pathlib.Path:
    # Without a message, the build would look like a hang.
    expected = f"about {_expect_seconds(os.cpu_count() or 1)} s on {os.cpu_count()} idle cores"
    _print(f"building the emulated accelerator for torch {torch.__version__}, once: {expected}")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            linked = _compile(compiler, pathlib.Path(scratch))
            file = _use_writable_directory(key, lambda directory: _copy(linked, directory))
    except OSError as error:
        reason = error.strerror or error
        raise EmulationUnavailable(
            f"the emulated accelerator could not be built among the temporary files: {reason}; set TMPDIR"
        ) from None
    if cache_directory() not in file.parents:
        _print(
            f"{cache_directory()} cannot be written or is full, so the emulated accelerator is kept in {file.parent}; "
            "set FSDP_DOCTOR_CACHE to another directory"
        )
    return file


def _expect_seconds(num_cores: int) -> int:
    """Estimates the seconds that the compilers take on ``num_cores`` cores.

    One core takes _BUILD_SECONDS in all. The largest unit takes 48 % of that time (36 of 76 s), which is therefore the
    shortest time on any number of cores.
    """
    return int(max(_BUILD_SECONDS / num_cores, _BUILD_SECONDS / 2))


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _compile(compiler: list[str], scratch: pathlib.Path) -> pathlib.Path:
    """Compiles the library into ``scratch``.

    Raises OSError if the disk is full, and EmulationUnavailable if a compiler fails.
    """
    sources = []
    for unit in _list_units():
        # The compiled file only includes the sources of the unit.
        sources.append(scratch / f"{unit[0]}.cpp")
        sources[-1].write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in unit))
    objects = [str(source.with_suffix(".o")) for source in sources]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        commands = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _run([*compiler, *_list_flags(), "-c", str(pair[0]), "-o", pair[1]]), commands))
    linked = scratch / _FILE
    directory = pathlib.Path(torch.__file__).parent / "lib"
    names = [f"-l{name}" for name in _LIBRARIES]
    _run([*compiler, "-shared", *objects, "-o", str(linked), f"-L{directory}", *names])
    return linked


def _copy(linked: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Copies the library into ``directory`` in such a way that no process sees an incomplete file.

    Raises OSError if the directory is full or cannot be written to.
    """
    with tempfile.TemporaryDirectory(dir=directory) as beside:
        return pathlib.Path(shutil.copy(linked, beside)).rename(directory / _FILE)


def _list_units() -> list[tuple[str, ...]]:
    """Lists the sources of each run of the compiler."""
    grouped = {name for unit in _UNITS for name in unit}
    return [*_UNITS, *((path.stem,) for path in sorted(_SOURCES.glob("*.cpp")) if path.stem not in grouped)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:] or ["?"]
    hint = "; install Python's headers (Debian: apt install python3-dev)" if "Python.h" in errors[0] else ""
    raise EmulationUnavailable(
        f"the emulated accelerator could not be built for torch {torch.__version__}: {errors[0].strip()}{hint}"
    )
