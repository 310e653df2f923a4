"""Fills in the template of the page, and writes the file."""

from __future__ import annotations

import base64
import hashlib
import pathlib

import jinja2
from markupsafe import Markup

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.known.catalogue import known_failures
from fsdp_doctor.page.page_data import columns, page_data
from fsdp_doctor.report.whole_file import replace_file
from fsdp_doctor.verdict.classification import MEANING
from fsdp_doctor.versions.merged import MergedReport

# In this order they are one script.
_SCRIPTS = ("cases.js", "choice.js", "matrix.js", "cell.js", "search.js", "start.js")
_ROOM = pathlib.Path(__file__).parent
# Escapes everything, for reports quote the output of programs.
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_ROOM),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def compat_page(merged: MergedReport, picture: str = "") -> str:
    """Renders the page. Raises UsageError where there is no result to show.

    picture: of ledgers, as SVG; empty without ledgers.
    """
    if not merged.cases:
        raise UsageError("the reports have no results, so there is nothing to show on a page")
    style, script = _text("page.css"), "\n".join(map(_text, _SCRIPTS))
    return _TEMPLATES.get_template("page.html.jinja").render(
        columns=columns(merged),
        environments=merged.environments,
        num_cases=len(merged.cases),
        data=page_data(merged),
        entries=known_failures(),
        meanings=MEANING,
        # Not escaped; the content security policy allows these alone.
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        picture=base64.b64encode(picture.encode()).decode(),
    )


def write_page(path: pathlib.Path, merged: MergedReport, picture: str = "") -> None:
    """Raises UsageError where there is no result to show, DoctorFault where the disk does not take the page."""
    text = compat_page(merged, picture)
    try:
        replace_file(path, text.encode(errors="replace"))
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None


def _text(name: str) -> str:
    return (_ROOM / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
