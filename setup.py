"""The long description of the package: README.md with its relative links made absolute, as an index needs them."""

from __future__ import annotations

import pathlib
import posixpath
import re
import sys

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROOT = pathlib.Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!#)([^):\s]+)\)")


def project_urls() -> dict[str, str]:
    """The addresses of the project, which pyproject.toml names."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["urls"])


def with_links_to(tree: str, markdown: str, page: str, published: str | None = None) -> str:
    """``markdown`` with its relative links leading into the repository.

    tree: a branch or a tag. page: the file that the links are relative to. published: a directory; links within it stay
    as they are. Pictures lead to the file itself, other links to the page that GitHub has of it.
    """
    repository = project_urls()["Source"]

    def absolute(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[3]))
        if published is not None and target.startswith(f"{published}/"):
            return link[0]
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}{repository}/{kind}/{tree}/{target})"

    return _LINK.sub(absolute, markdown)


def _version() -> str:
    package = (_ROOT / "fsdp_doctor" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', package, re.MULTILINE)[0]


if __name__ == "__main__":
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=with_links_to(f"v{_version()}", readme, page="README.md"),
        long_description_content_type="text/markdown",
    )
