"""The built library as a wheel: a machine with the same torch and Python, and no compiler, installs it with pip."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import sys
import sysconfig
import zipfile

import torch
from packaging.version import Version

from fsdp_doctor.emulated.build import PREBUILT, prebuilt_name

_INIT = '"""The emulated device\'s library, built. fsdp_doctor.emulated finds it here."""\n'


def pack(library: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Writes the wheel of ``library`` into ``directory``, which is made if need be, and returns its path."""
    release = Version(torch.__version__).base_version
    version = f"{release}+{prebuilt_name().split('.')[0].removeprefix('_C_')}"
    tag = f"{_python()}-{_python()}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    information = f"{PREBUILT}-{version}.dist-info"
    files = {
        f"{PREBUILT}/__init__.py": _INIT.encode(),
        f"{PREBUILT}/{prebuilt_name()}": library.read_bytes(),
        f"{information}/METADATA": _metadata(version, release).encode(),
        f"{information}/WHEEL": _wheel(tag).encode(),
    }
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{PREBUILT}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def _python() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _metadata(version: str, release: str) -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {PREBUILT}",
        f"Version: {version}",
        "Summary: The library of fsdp_doctor.emulated, built",
        f"Requires-Dist: torch=={release}",
    ]
    return "\n".join(lines) + "\n"


def _wheel(tag: str) -> str:
    lines = ["Wheel-Version: 1.0", "Generator: fsdp-doctor", "Root-Is-Purelib: false", f"Tag: {tag}"]
    return "\n".join(lines) + "\n"


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
