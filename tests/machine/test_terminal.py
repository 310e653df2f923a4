"""Text that is no wider than a terminal, with every word whole."""

from __future__ import annotations

import pytest

from fsdp_doctor.machine.terminal import measure_width, wrap, wrap_all

_WORDS = "Remedy: set actor_rollout_ref.actor.fsdp_config.offload_policy=False and leave the model where it is. " * 3


@pytest.mark.parametrize("indent", [0, 4, 12])
@pytest.mark.parametrize("width", [72, 80, 120])
def test_a_long_line_is_broken_at_blanks_and_goes_on_further_in(width: int, indent: int) -> None:
    lines = wrap(" " * indent + _WORDS, width)
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    assert [word for line in lines for word in line.split()] == _WORDS.split()
    assert [len(line) - len(line.lstrip()) for line in lines] == [indent, *(indent + 2 for _ in lines[1:])]


def test_a_word_that_is_wider_than_the_terminal_stays_whole() -> None:
    assert wrap(f"see {'x' * 200}", 80) == ["see", f"  {'x' * 200}"]


def test_what_fits_stays_as_it_is() -> None:
    text = "a  table   of cells\n\n  b\n"
    assert wrap_all(text.splitlines(), 80) == text


def test_the_width_is_the_terminals_up_to_a_readable_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert measure_width() == 72
    monkeypatch.setenv("COLUMNS", "300")
    assert measure_width(132) == 132
