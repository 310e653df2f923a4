"""What mkdocs.yml cannot say: addresses, the pages of a folder, links out of docs/, and the pages that are made.

These are the page of the merged report, and one for each entry of the catalogue of known failures.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from fsdp_doctor.explain.text import make_command
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.page import render_page
from fsdp_doctor.versions.merged import read_merged

_DOCS = pathlib.Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("setup", _DOCS.parent / "setup.py")
assert _spec is not None
assert _spec.loader is not None
_setup = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_setup)


def on_config(config: Any) -> Any:
    config.site_url = _setup.project_urls()["Documentation"]
    config.repo_url = _setup.project_urls()["Source"]
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    pages = {"compat/index.html": render_page(read_merged(_DOCS / "compat" / "merged.json.gz"))}
    pages["failures/index.md"] = "\n".join(_list_failures())
    pages |= {f"failures/{entry.short_code}.md": "\n\n".join(_describe(entry)) for entry in read_catalogue()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _list_failures() -> Iterator[str]:
    yield "# Known failures\n\n| code | verdict | failure |\n|---|---|---|"
    for entry in read_catalogue():
        yield f"| [{entry.short_code}]({entry.short_code}.md) | {entry.verdict} | {_escape(entry.title)} |"


def _describe(entry: KnownFailure) -> Iterator[str]:
    """The paragraphs of an entry's page."""
    yield f"# {entry.short_code}: {_escape(entry.title)}"
    torch = f", torch {entry.torch}" if entry.torch else ""
    yield f"`{entry.id}`: [{entry.verdict}](../verdicts.md){torch}."
    for heading, text in {"Cause": entry.cause, "How to see it": entry.check, "Remedy": entry.advice}.items():
        if text:
            yield f"**{heading}.** {_escape(text)}"
    if entry.code:
        yield f"```python\n{entry.code.strip()}\n```"
    for framework in entry.remedies:
        yield f"**In {framework}.** {_escape(entry.advise(framework))}"
    yield f"**References.** {', '.join(map(_link, entry.references))}"
    if command := make_command(entry):
        yield f"**Reproduce.**\n\n```\n{command}\n```"
    if entry.measured:
        page = f"../compat/index.html#entry-{entry.id}"
        yield f"**Measured with torch, by device.** [{'; '.join(entry.measured)}]({page})"


def _link(reference: str) -> str:
    url = f"https://github.com/{reference.replace('#', '/issues/')}"
    return f"[{reference}]({url})" if "#" in reference else f"`{reference}`"


def _escape(text: str) -> str:
    """Plain text as Markdown: names and patterns have characters that mean something there."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text)


def _expanded(entry: Any) -> Any:
    """An entry of the navigation in which a pattern is the list of the pages that it matches."""
    match entry:
        case list():
            return [_expanded(each) for each in entry]
        case dict():
            return {title: _expanded(each) for title, each in entry.items()}
        case str() if "*" in entry:
            pages = sorted(page.relative_to(_DOCS) for page in _DOCS.glob(entry))
            return [{page.stem.replace("-", " "): str(page)} for page in pages]
        case _:
            return entry


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return str(_setup.with_links_to("main", markdown, page=f"docs/{page.file.src_uri}", published="docs"))
