"""What `fsdp-doctor explain` prints: who raised the cause, what followed from it, and what is only similar."""

from __future__ import annotations

import io
import json
import pathlib
import sys

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain import explain, text

_ASSERTION = "AssertionError: Expects tensor to be on the compute device cuda:0, was on cpu"
_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def _text(tmp_path: pathlib.Path, *lines: str) -> str:
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines) + "\n")
    return text.as_text(explain([log]), 120).replace(str(tmp_path), "logs")


@pytest.mark.parametrize(
    ("lines", "heading"),
    [
        ([_ASSERTION], "Root cause: logs/job.log, line 1"),
        ([_ASSERTION, "", _ASSERTION], "Root cause: logs/job.log, line 1 (2 times)"),
        ([f"[rank{rank}]: {_ASSERTION}" for rank in (1, 0)], "Root cause: logs/job.log, line 1 (rank 0, rank 1)"),
        (
            [f"[rank{rank}]: {_ASSERTION}" for rank in range(11)],
            f"Root cause: logs/job.log, line 1 ({', '.join(f'rank {rank}' for rank in range(8))} and 3 more)",
        ),
    ],
    ids=["once", "twice", "two ranks", "many ranks"],
)
def test_the_first_line_says_where_the_cause_is_and_who_raised_it(
    tmp_path: pathlib.Path, lines: list[str], heading: str
) -> None:
    assert _text(tmp_path, *lines).splitlines()[0] == heading


def test_what_followed_is_counted_by_what_it_is(tmp_path: pathlib.Path) -> None:
    closed = "RuntimeError: Connection closed by peer [127.0.0.1]:40214"
    timed_out = "RuntimeError: [buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    shown = _text(
        tmp_path, f"[rank0]: {_ASSERTION}", f"[rank1]: {closed}", f"[rank2]: {closed}", f"[rank3]: {timed_out}"
    )
    assert "Consequence: the connection to a rank that had ended was closed (2 times)\n" in shown
    assert "Consequence: a rank timed out while it waited for another\n" in shown


def test_an_entry_that_only_shares_the_message_is_not_said_to_be_the_cause(tmp_path: pathlib.Path) -> None:
    traceback = ("Traceback (most recent call last):", '  File "/a.py", line 3, in load', _OUT_OF_MEMORY)
    shown = _text(tmp_path, "strategy: fsdp", *traceback)
    assert "Known: " not in shown
    possible = shown.split("Possible: ")[1]
    assert possible.startswith("dsd-load-oom-broadcast")
    assert "Cause: " in possible
    assert "Remedy: " in possible
    assert "does the traceback go through set_model_state_dict or its broadcast?" in possible.split("To be sure:")[1]
    assert "To report it, attach:" not in _text(tmp_path, *traceback)


def test_a_log_without_an_exception_is_not_told_that_the_catalogue_lacks_it(tmp_path: pathlib.Path) -> None:
    shown = _text(tmp_path, "step 1", "step 2")
    assert shown == "The log shows no failure.\n"


def test_standard_input_is_read_to_its_end_and_named_as_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"step\n" * 400_000 + _ASSERTION.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    explanation = json.loads(text.as_json(explain([None])))
    assert (explanation["matched"], explanation["cause"]["file"], explanation["cause"]["line"]) == (
        True,
        "standard input",
        400_001,
    )


def test_a_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed; give a file instead of -"):
        explain([None])
