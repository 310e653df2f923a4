"""The long description of the package: README.md with its relative links made absolute, as an index needs them."""

from __future__ import annotations

import pathlib
import re
import sys

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROOT = pathlib.Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!#)([^):\s]+)\)")


def repository() -> str:
    """The address of the repository, as pyproject.toml names it."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Source"])


def with_links_to(tree: str, markdown: str) -> str:
    """``markdown`` with each relative link leading into the repository.

    tree: a branch or a tag. Pictures lead to the file itself, other links to the page that GitHub has of it.
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}{repository()}/{kind}/{tree}/{link[3]})"

    return _LINK.sub(absolute, markdown)


def _version() -> str:
    package = (_ROOT / "fsdp_doctor" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', package, re.MULTILINE)[0]


if __name__ == "__main__":
    setup(
        long_description=with_links_to(f"v{_version()}", (_ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
