"""Builds the device's library with the machine's C++ compiler, once for each torch and each source."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from packaging.version import Version

OLDEST_TORCH = "2.10"
_SOURCES = pathlib.Path(__file__).parents[1] / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
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

    Any number of processes may call it at once: one builds, the others wait for it. Raises
    EmulationUnavailable.
    """
    _check_torch()
    if installed := _installed():
        return installed
    compiler = _compiler()
    directory = cache_directory() / _key(compiler)
    target = directory / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        with _locked(directory):
            if not target.exists():
                _build(compiler, target)
    return target


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


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when the process ends, however that is."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / "lock", "w")
    except OSError as error:
        raise EmulationUnavailable(
            f"the emulated accelerator cannot be kept in {directory}: {error.strerror}; set FSDP_DOCTOR_CACHE"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(compiler: list[str], target: pathlib.Path) -> None:
    print(  # noqa: T201, half a minute without a word would look like a hang
        f"building the emulated accelerator for torch {torch.__version__}, once", file=sys.stderr, flush=True
    )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = [_source(unit, pathlib.Path(scratch)) for unit in _units()]
        objects = [source.with_suffix(".o") for source in sources]
        commands = [
            [*compiler, *_flags(), "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        libraries = pathlib.Path(torch.__file__).parent / "lib"
        linked = pathlib.Path(scratch) / target.name
        named = [f"-l{name}" for name in _LIBRARIES]
        _run([*compiler, "-shared", *map(str, objects), "-o", str(linked), f"-L{libraries}", *named])
        # In one step, so that nobody ever finds half of it.
        linked.rename(target)


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
