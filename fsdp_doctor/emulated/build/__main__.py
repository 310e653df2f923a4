"""``python -m fsdp_doctor.emulated.build`` builds the device's library, and with ``--wheel`` packs it as a wheel.

A machine with the same torch and Python installs the wheel with pip and needs no compiler.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import sys
import sysconfig
import zipfile

import torch
from packaging.version import Version

from fsdp_doctor.emulated.build import PREBUILT, find_library, make_prebuilt_name

_INIT = '"""The emulated device\'s library, built. fsdp_doctor.emulated finds it here."""\n'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_doctor.emulated.build", description=__doc__)
    parser.add_argument(
        "--wheel",
        nargs="?",
        const=pathlib.Path("dist"),
        type=pathlib.Path,
        metavar="DIR",
        help="write a wheel for machines without a compiler, of this torch and this Python, into DIR (dist)",
    )
    directory = parser.parse_args().wheel
    method = find_library() if directory is None else pack_wheel(find_library(), directory)
    sys.stdout.write(f"{method}\n")


def pack_wheel(file: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Writes the wheel of the library ``file`` into ``directory``, which is created if necessary. Returns its path."""
    release = Version(torch.__version__).base_version
    version = f"{release}+{make_prebuilt_name().split('.')[0].removeprefix('_C_')}"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    information = f"{PREBUILT}-{version}.dist-info"
    contents = {
        f"{PREBUILT}/__init__.py": _INIT.encode(),
        f"{PREBUILT}/{make_prebuilt_name()}": file.read_bytes(),
        f"{information}/METADATA": (
            f"Metadata-Version: 2.1\nName: {PREBUILT}\nVersion: {version}\n"
            f"Summary: The library of fsdp_doctor.emulated, built\nRequires-Dist: torch=={release}\n"
        ).encode(),
        f"{information}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: fsdp-doctor\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
    }
    record = ""
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    contents[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{PREBUILT}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)
    return path


if __name__ == "__main__":
    main()
