"""The one line by which a verdict tells of an exception."""

from __future__ import annotations

import pytest

from fsdp_doctor.verdict.records import Failure

_CARRIED = """CheckpointException ranks:dict_keys([0, 1])
Traceback (most recent call last): (RANK 0)
  File "torch/distributed/checkpoint/default_planner.py", line 495, in create_default_local_load_plan
    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
RuntimeError: Missing key in checkpoint state_dict: model.norm.weight.
Traceback (most recent call last): (RANK 1)
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", "E"),
        ("first\nsecond", "E: first"),
        ("Error(s) in loading:\n\tMissing key(s)\n\tmore", "E: Error(s) in loading: Missing key(s)"),
        (_CARRIED, "E: RuntimeError: Missing key in checkpoint state_dict: model.norm.weight."),
        (_CARRIED.splitlines()[0] + "\n" + _CARRIED.splitlines()[1], "E: CheckpointException ranks:dict_keys([0, 1])"),
    ],
)
def test_the_line_says_what_went_wrong_and_no_heading(message: str, expected: str) -> None:
    assert Failure(type="E", message=message, traceback="", time=0.0).summary == expected
