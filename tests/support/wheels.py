"""A package index that needs no network: its wheels have a version and almost no content."""

from __future__ import annotations

import pathlib
import sysconfig
import zipfile

from packaging.requirements import Requirement

from fsdp_doctor.report.versions.sweeping import read_package_requirements
from support.places import TESTS


def index_with_torch(directory: pathlib.Path, *versions: str) -> dict[str, str]:
    """Makes wheels of torch in these versions, and of the doctor's other requirements.

    Each torch adds the packages of this interpreter and of the tests to Python's path, so that the installation works.
    Returns the environment variables that make uv install only from this index, with its cache in ``directory``.
    """
    directory.mkdir(exist_ok=True)
    for version in versions:
        _wheel(
            directory, "torch", version, {"torch_of_the_tests.pth": f"{sysconfig.get_paths()['purelib']}\n{TESTS}\n"}
        )
    for text in read_package_requirements():
        name = Requirement(text).name
        if name != "torch":
            _wheel(directory, name, "99.0.0", {})
    return {
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(directory),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(directory / "cache"),
    }


def _wheel(directory: pathlib.Path, name: str, version: str, files: dict[str, str]) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    contents = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (contents | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, text)
