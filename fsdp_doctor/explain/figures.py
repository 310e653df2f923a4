"""Compares a log's figures, such as the loss, with the figures before the last load or sync of weights."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.explain.rank_lines import NEAR, Found, has_any

CHANGE_WORDS = ("oad", "esum", "estor", "ync", "update_weights", "eight update")
FIGURE_WORDS = ("loss", "grad_norm", "kl", "step 0")
_LOADED = re.compile(r"(?i)\b(?:resum\w*|load(?:ed|ing)|restored|restoring)\b")
_SYNCED = re.compile(
    r"(?i)\b(?:weight|param\w*)[ _]sync|\bsync\w* (?:the )?(?:weights|params|parameters)|update_weights|weight update"
)
_FIGURE = re.compile(
    r"(?<![a-z])(?P<name>loss|grad_norm|kl)['\"]?\s?[:=|]?\s?['\"]?(?P<value>\d{1,9}(?:\.\d{1,9})?(?:e[+-]?\d{1,3})?)"
)
# By how much the first figure after a load is above the last before it, where it is no noise; and where it is small.
_JUMPS = {"loss": 1.5, "grad_norm": 8.0, "kl": 10.0}
_SMALL = {"loss": 0.0, "grad_norm": 0.0, "kl": 0.1}
_TOLD = re.compile(
    r"(?i)\b(?P<name>loss|perplexity|grad(?:ient)?[ _]norm|eval\w*)\b.{0,60}?\b"
    r"from\s+~?(?P<a>\d+(?:\.\d+)?)\s+(?:up )?to\s+~?(?P<b>\d+(?:\.\d+)?)"
)
_RESUMED = re.compile(r"(?i)\b(?:resum|restor|load)\w*\b.*?(?:checkpoint|step|ckpt)\D{0,12}(?P<step>\d{1,9})")
_FROM_ZERO = re.compile(
    r"(?i)\b(?:from|at|global)[ _](?:global[ _])?step\W{0,3}0\b(?!\.)"
    r"|(?:will skip|skipping)(?: the first)? 0 (?:epochs|batches)"
)
_RESUME = "`fsdp-doctor resume -- COMMAND` runs the job without and with a resume, and names the differences."
_MAX_COLUMNS = 12
# In how many steps after a load or a sync a figure is compared, and how much greater the jump of a later step must be.
_STEPS, _LATER = 3, 4
_AFTER_AN_UPDATE = (
    "The first figure comes from the loaded weights alone, and the next ones from an update: is it the optimizer's "
    "state that came back other than it was saved?"
)
_COMPARE_ENGINE = (
    "Do trainer and engine have the same weights after the sync? Compare `fsdp_doctor.fingerprint` of the model and "
    "of the weights that the engine got."
)


_RESUMED_COLUMN = re.compile(r"(?i)^(?:after_?)?(?:resum|reload|restor|loaded)\w*$")
_WHOLE_COLUMN = re.compile(
    r"(?i)^(?:original|baseline|reference|uninterrupted|continuous|expected|before\w*|no_resume)$"
)
_EQUALLY, _APART = 1e-3, 3.0


class TableReader:
    """Reads a table that compares each step of a resumed run with the same step of the run without a resume."""

    def __init__(self) -> None:
        self._columns: tuple[int, int] | None = None
        self._equal: list[int] = []

    def read(self, number: int, raw: str) -> Found | None:
        """Reads the next line, and returns the symptom that this line completes; None if there is none."""
        if self._columns is None and not has_any(CHANGE_WORDS, raw):
            return None
        cells = raw.replace("|", " ").split()
        if not cells or set(cells[0]) <= set("-:="):
            return None
        if self._columns is None or not cells[0][0].isdigit():
            self._columns = _find_columns(cells)
            self._equal = []
            return None
        try:
            whole, resumed = (float(cells[at]) for at in self._columns)
        except (IndexError, ValueError):
            return None
        if abs(resumed - whole) <= _EQUALLY * abs(whole):
            self._equal.append(number)
        if resumed < _APART * abs(whole) or not whole:
            return None
        clash = f"the resumed run has {resumed:g} where the run without a resume has {whole:g}"
        if not self._equal:
            return Found(clash, _RESUME, (number,))
        steps = "an equal step" if len(self._equal) == 1 else f"{len(self._equal)} equal steps"
        return Found(f"{clash}, after {steps}", f"{_AFTER_AN_UPDATE} {_RESUME}", (self._equal[0], number))


def _find_columns(cells: Sequence[str]) -> tuple[int, int] | None:
    """Finds the columns of the run without a resume and of the resumed run in a table's first line.

    Returns None if the line does not name each column once.
    """
    whole = [at for at, cell in enumerate(cells) if _WHOLE_COLUMN.match(cell)]
    resumed = [at for at, cell in enumerate(cells) if _RESUMED_COLUMN.match(cell)]
    return (whole[0], resumed[0]) if len(whole) == len(resumed) == 1 and len(cells) <= _MAX_COLUMNS else None


class FigureReader:
    """Finds a figure that jumps within three steps after a load or sync, and a step that is lost by a load."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}
        self._changed: tuple[int, str] | None = None
        self._steps = 0
        self._told_load = False
        self._resumed: tuple[str, int] | None = None

    def read(self, number: int, raw: str) -> Found | None:
        """Reads the next line, and returns the symptom that this line completes; None if there is none."""
        figures: dict[str, float] = {}
        if "loss" in raw or "grad_norm" in raw or "kl" in raw:
            figures = {match["name"]: float(match["value"]) for match in _FIGURE.finditer(raw)}
        jump = self._compare(number, figures)
        if not has_any(CHANGE_WORDS, raw) and " from " not in raw and "step 0" not in raw:
            return jump
        is_load = _LOADED.search(raw) is not None
        if not figures and _SYNCED.search(raw):
            self._changed, self._steps = (number, "a sync of the weights"), 0
        elif not figures and is_load:
            self._changed, self._steps = (number, "a load"), 0
        self._told_load = self._told_load or is_load
        return jump or self._read_told(number, raw) or self._read_step(number, raw)

    def _compare(self, number: int, figures: dict[str, float]) -> Found | None:
        found: Found | None = None
        self._steps += bool(figures)
        is_first = self._steps == 1
        for name, value in figures.items():
            before, at = self._before.get(name, (0.0, 0))
            least = max(_JUMPS[name] * (1 if is_first else _LATER) * before, _SMALL[name])
            if found is None and self._changed and before and value > least:
                changed_at, change = self._changed
                step = "at the first step" if is_first else f"{self._steps} steps"
                clash = f"{name} is {value:g} {step} after {change}, but was {before:g} before it"
                decide = _RESUME if change == "a load" else _COMPARE_ENGINE
                if not is_first:
                    decide = f"{_AFTER_AN_UPDATE} {decide}"
                found = Found(clash, decide, (at, changed_at, number))
            if self._changed is None or self._steps >= _STEPS:
                self._before[name] = value, number
        if self._steps >= _STEPS:
            self._changed = None
        return found

    def _read_told(self, number: int, raw: str) -> Found | None:
        if (told := _TOLD.search(raw)) and self._told_load and float(told["b"]) > 1.5 * float(told["a"]):
            return Found(f"{told['name']} goes from {told['a']} to {told['b']} with a load", _RESUME, (number,))
        return None

    def _read_step(self, number: int, raw: str) -> Found | None:
        if self._resumed and number - self._resumed[1] < NEAR and _FROM_ZERO.search(raw):
            step, at = self._resumed
            clash = f"the checkpoint is of step {step}, but the job goes on from step 0"
            return Found(clash, f"Which file has the step, and does the load read it? {_RESUME}", (at, number))
        if (resumed := _RESUMED.search(raw)) and int(resumed["step"]):
            self._resumed = resumed["step"], number
        return None
