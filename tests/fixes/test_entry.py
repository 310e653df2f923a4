"""Tests which command a failure's fix is named by: the sentence that explain and check have second."""

from __future__ import annotations

import re

import pytest

from fsdp_doctor.fixes.entry import FIXES, find_fix_command
from fsdp_doctor.known.catalogue import find_entry


def test_fixes_of_libraries_are_one_command() -> None:
    assert re.findall(r"--framework (\S+)", find_fix_command("FD200")) == ["peft", "accelerate"]


@pytest.mark.parametrize(
    ("mends", "framework", "named"),
    [
        ("FD093", "verl", ["verl"]),
        ("FD093", "transformers", ["peft"]),
        ("FD197", "axolotl", ["accelerate"]),
        ("FD009", "accelerate", ["accelerate"]),
        ("FD006", "lightning", ["lightning"]),
        ("FD009", "torchtitan", []),
    ],
)
def test_a_framework_is_told_its_own_fixes_and_those_of_its_libraries(
    mends: str, framework: str, named: list[str]
) -> None:
    assert re.findall(r"--framework (\S+)", find_fix_command(mends, framework=framework)) == named


def test_a_release_outside_of_the_range_is_told_no_fix() -> None:
    assert find_fix_command("FD197", framework="accelerate", versions={"accelerate": "1.15.0"})
    assert not find_fix_command("FD197", framework="accelerate", versions={"accelerate": "1.12.0"})


def test_a_crash_that_other_code_shares_gets_a_fix_by_its_traceback() -> None:
    lightning = find_fix_command("FD006", function="lightning/pytorch/trainer/trainer.py in fit")
    assert "--framework lightning" in lightning
    assert find_fix_command("FD006", function="train.py in main") == find_fix_command("FD006") == ""


def test_each_fix_has_one_name_for_one_function() -> None:
    assert len({fix.target for fix in FIXES}) == len({fix.id for fix in FIXES})


def test_a_fix_for_a_failure_without_frames_needs_a_clue() -> None:
    shown = {"clues": ("sharding by transformers",), "function": "train.py in main"}
    assert "--framework transformers" in find_fix_command("FD006", **shown)
    assert not find_fix_command("FD006", **shown, versions={"transformers": "5.30.0"})
    assert not find_fix_command("FD006", function="train.py in main")
    assert "lightning" not in find_fix_command("FD006", **shown)


def test_each_fix_mends_a_failure_of_the_catalogue() -> None:
    for fix in FIXES:
        assert fix.mends, fix.id
        assert all(find_entry(code).short_code == code for code in fix.mends), fix.id
