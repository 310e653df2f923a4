"""What a sentence of ours takes from others: the first line of an exception, the first of many names."""

from __future__ import annotations

import pytest

from fsdp_doctor.errors import first_line, some


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("out of memory\nTried to allocate"), "out of memory"),
        (RuntimeError("\n\n  out of memory \n"), "out of memory"),
        (RuntimeError(), "RuntimeError"),
        (KeyboardInterrupt("  \n"), "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_told_in_one_line_that_is_never_empty(error: BaseException, line: str) -> None:
    assert first_line(error) == line


def test_of_many_names_the_first_are_told_and_the_others_counted() -> None:
    assert some("ab") == "a, b"
    assert some("abcde") == "a, b, c, d, e"
    assert some("abcdef") == "a, b, c, d, e and 1 more"
    assert some({"a": 0, "b": 0, "c": 0}, most=2) == "a, b and 1 more"
