"""``fsdp-doctor checkpoint verify`` finds each kind of damage that is planted."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from support import saved_checkpoints as saved
from support.damages import DAMAGES, to_shards

from fsdp_doctor.checkpoints import verification


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_found(originals: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    source, damage, trouble = DAMAGES[name]
    directory = tmp_path / source
    for each in {source, *({"verl"} if damage is to_shards else ()), *({"tied"} if trouble == "twice" else ())}:
        shutil.copytree(originals / each, tmp_path / each)
    damage(directory)
    found = verification.verify(directory)
    assert (found.answer, trouble in saved.list_troubles(found)) == ("damaged", True), found.to_text()
