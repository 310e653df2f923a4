"""What is on disk of a save in the background that did not come to its end is not called sound."""

from __future__ import annotations

import pathlib

import pytest
from support.forked import run_script
from support.places import TESTS

from fsdp_doctor.checkpoints.verification import verify


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ("waited for", "sound"),
        ("before the files", "cannot be judged"),
        ("before the metadata", "damaged"),
        ("the store is full", "damaged"),
    ],
)
def test_only_a_save_that_was_waited_for_is_sound(tmp_path: pathlib.Path, end: str, answer: str) -> None:
    directory = tmp_path / "checkpoint"
    script = TESTS / "support" / "saved_in_background.py"
    done = run_script(script, device="cpu", arguments=[str(directory), end])
    assert done.codes == [0, 0], done.output
    assert verify(directory).answer == answer
