"""Finds symptoms in a log without exceptions, in single lines and by comparing the lines of several ranks."""

from __future__ import annotations

from dataclasses import replace

from fsdp_doctor.explain.devices import DeviceReader
from fsdp_doctor.explain.figures import CHANGE_WORDS, FIGURE_WORDS, FigureReader, TableReader
from fsdp_doctor.explain.keys import compare_keys, find_keys
from fsdp_doctor.explain.log_input import LogPiece, parse_line
from fsdp_doctor.explain.mechanisms import Reading, apply_mechanism, read_mechanisms
from fsdp_doctor.explain.rank_lines import NEAR, Found, has_any
from fsdp_doctor.explain.rank_values import TOTAL_WORDS, ValueReader, names_total
from fsdp_doctor.explain.saves import SaveReader

# Each mechanism of a symptom needs one of them, and looking for a word is a tenth of looking for a pattern.
_SYMPTOM_WORDS = (
    *("newly initialized", "diff", "empty for", "keys", "nan", "NaN", "grad_norm", "corr", "MISSING", "MISMATCH"),
    *(
        "gibberish",
        "garbled",
        "!!!!!!!!",
        "stuck",
        "hang",
        "not updat",
        "not chang",
        "n't chang",
        "n't updat",
        "identical",
    ),
    *(
        "freez",
        "repeated tok",
        "not used when",
        "expected",
        "Expected",
        "deadlock",
        "never re",
        "['",
        "nly rank",
        "nly the main",
        "nly on",
    ),
)
# Words of a line that may be a failure without the form of an exception.
_ALONE_WORDS = (
    "rror",
    "RROR",
    "Expect",
    "mismatch",
    "metadata:",
    "WARN",
    "Xid",
    "device handle",
    "has no attribute",
    "failed to bind",
)
_HINTS = (
    *(*FIGURE_WORDS, "sav", "Sav", "emory", "MiB", *CHANGE_WORDS, *TOTAL_WORDS),
    *(*_SYMPTOM_WORDS, *_ALONE_WORDS),
)


class SymptomReader:
    """Finds symptoms in a log without exceptions. Call ``read`` with each piece of a file in order, then ``end``."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.found: Reading | None = None
        self.told: Reading | None = None
        self._figures = FigureReader()
        self._table = TableReader()
        self._saves = SaveReader()
        self._values = ValueReader()
        self._devices = DeviceReader()
        self._keys: tuple[list[str], int] | None = None

    def read(self, piece: LogPiece) -> None:
        if self.found is None:
            for number, raw in zip(piece.numbers, piece.lines, strict=True):
                self._find(self._table.read(number, raw))
        # Few of them are in a piece, and each is looked for in every line.
        hints = [hint for hint in _HINTS if self.found is None and hint in piece.text]
        if not hints:
            return
        alone = [hint for hint in hints if hint in _ALONE_WORDS]
        symptoms = [hint for hint in hints if hint in _SYMPTOM_WORDS]
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if self.found is not None:
                return
            may_be_alone = has_any(alone, raw)
            is_symptom = has_any(symptoms, raw)
            if may_be_alone or is_symptom or has_any(hints, raw):
                self._read_line(number, raw, may_be_alone=may_be_alone, is_symptom=is_symptom)

    def end(self) -> Reading | None:
        """Compares the ranks' messages after the end of the log, and returns the symptom that was found, or None."""
        if self.found is None:
            self._find(self._saves.end() or self._values.end() or self._devices.end())
        return self.found

    def _read_line(self, number: int, raw: str, *, may_be_alone: bool, is_symptom: bool) -> None:
        """Looks for a symptom in one line.

        may_be_alone: whether the line has a word of a failure.
        is_symptom: whether the line has a word of a symptom.
        """
        self._find(self._figures.read(number, raw))
        names_save = "sav" in raw or "Sav" in raw
        is_total = names_total(raw)
        names_memory = "emory" in raw or "MiB" in raw
        if not (may_be_alone or is_symptom or names_save or is_total or names_memory):
            return
        line = parse_line(number, raw)
        if names_save:
            self._find(self._saves.read(number, line.text, line.source))
        if (is_total or names_memory) and not self._devices.read(number, line.text):
            self._values.read(number, line.text, line.source, names_memory=names_memory and not is_total)
        if "keys" in raw or "['" in raw:
            self._find(self._read_keys(number, line.text))
        if may_be_alone or is_symptom:
            self._apply_mechanisms(number, line.text, may_be_alone=may_be_alone)

    def _apply_mechanisms(self, number: int, text: str, *, may_be_alone: bool) -> None:
        for mechanism in read_mechanisms():
            is_meant = mechanism.symptom or (mechanism.alone and may_be_alone)
            if not is_meant or (shown := apply_mechanism(mechanism, text)) is None:
                continue
            if mechanism.told:
                self.told = self.told or self._make_reading(Found(*shown, (number,)))
            else:
                self._find(Found(*shown, (number,)), mechanism.subjects)

    def _read_keys(self, number: int, text: str) -> Found | None:
        """Compares two lists of names in one line, or in two lines near each other; None if they show no symptom."""
        lists = find_keys(text)
        if len(lists) == 1 and self._keys is not None and number - self._keys[1] < NEAR:
            lists = [self._keys[0], *lists]
        if len(lists) == 1:
            self._keys = lists[0], number
        elif len(lists) > 1 and (found := compare_keys(lists[0], lists[1])):
            return Found(*found, (*([self._keys[1]] if self._keys else []), number))
        return None

    def _find(self, found: Found | None, subjects: tuple[str, ...] = ()) -> None:
        if found is not None and self.found is None:
            self.found = replace(self._make_reading(found), subjects=subjects)

    def _make_reading(self, found: Found) -> Reading:
        lines = tuple(f"{self._file}, line {at}" for at in dict.fromkeys(found.numbers))
        return Reading(clash=found.clash, decide=found.decide, lines=lines)
