"""Tests how a patch with torch alone is made of the table of edits."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes import entry, patches
from fsdp_doctor.fixes.patches import Edit, read_edits, render_patch
from fsdp_doctor.fixes.sources import FixedFunction

_MAX_LINES = 60
_EDITED = tuple(dict.fromkeys(edit.fix for edit in read_edits()))
_FUNCTION = FixedFunction(
    fix=dataclasses.replace(entry.FIXES[0], id="toy", target="json:loads"),
    version="1.0",
    release="1.0",
    file=pathlib.Path(json.__file__),
    first_line=1,
    num_wrappers=0,
)


@pytest.mark.parametrize("id", _EDITED)
def test_a_patch_with_torch_alone_has_at_most_sixty_lines(id: str) -> None:
    assert sum(edit.num_lines for edit in read_edits() if edit.fix == id) <= _MAX_LINES
    assert any(fix.id == id for fix in entry.FIXES)


@pytest.mark.parametrize("old", ["def lots(", "def load"])
def test_an_edit_whose_text_is_not_once_in_the_module_is_refused(monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    """The first is nowhere in json, the second twice."""
    monkeypatch.setattr(patches, "read_edits", lambda: [Edit(fix="toy", old=old, new="")])
    with pytest.raises(CannotRun, match="fix toy: json differs from the source"):
        render_patch([_FUNCTION])


def test_a_patch_of_edits_needs_no_import_of_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Edit(fix="toy", old="def loads(", new="# changed\ndef loads(")
    monkeypatch.setattr(patches, "read_edits", lambda: [edit])
    patch = render_patch([_FUNCTION])
    assert (patch.importing, edit.num_lines) == ((), 1)
    assert "+++ b/json/__init__.py" in patch.text
    assert "fsdp_doctor" not in patch.text
    assert patch.text.count("\n+") == 2
