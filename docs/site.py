"""What mkdocs.yml cannot say: addresses, the pages of a folder, links out of docs/, the page of the merged report."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

from mkdocs.structure.files import File, Files

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
    """Adds the page of the merged report, which is not committed."""
    page = render_page(read_merged(_DOCS / "compat" / "merged.json.gz"))
    files.append(File.generated(config, "compat/index.html", content=page))
    return files


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
