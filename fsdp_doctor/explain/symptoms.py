"""Finds symptoms in a log without exceptions, in single lines and by comparing the lines of several ranks."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_doctor.explain.keys import compare_keys, find_keys
from fsdp_doctor.explain.log_input import LogPiece, parse_line
from fsdp_doctor.explain.mechanisms import Reading, apply_mechanism, read_mechanisms
from fsdp_doctor.text import join_some

_LOADED = re.compile(r"(?i)\b(?:resum\w*|load(?:ed|ing)|restored|restoring)\b")
_SYNCED = re.compile(
    r"(?i)\b(?:weight|param\w*)[ _]sync|\bsync\w* (?:the )?(?:weights|params|parameters)|update_weights|weight update"
)
_FIGURE = re.compile(
    r"(?<![a-z])(?P<name>loss|grad_norm|kl)['\"]?\s?[:=|]?\s?['\"]?(?P<value>\d{1,9}(?:\.\d{1,9})?(?:e[+-]?\d{1,3})?)"
)
_SAVED_TO = re.compile(r"(?i)\bsav\w+\b.*?(?P<path>/[\w./-]{3,300})")
_RANK = re.compile(r"\[?\b(?i:rank) ?:?(?P<number>\d{1,6})\b\]?")
# Within so many lines two ranks save the same checkpoint.
_NEAR = 64
# By how much the first figure after a load is above the last before it, where it is no noise; and where it is small.
_JUMPS = {"loss": 1.5, "grad_norm": 8.0, "kl": 10.0}
_SMALL = {"loss": 0.0, "grad_norm": 0.0, "kl": 0.1}
_TOLD = re.compile(
    r"(?i)\b(?P<name>loss|perplexity|grad(?:ient)?[ _]norm|eval\w*)\b.{0,60}?\b"
    r"from\s+~?(?P<a>\d+(?:\.\d+)?)\s+(?:up )?to\s+~?(?P<b>\d+(?:\.\d+)?)"
)
_BEGINS = re.compile(r"(?i)\b(?:saving|start\w*(?: to)? sav\w*|begin\w* (?:to )?sav\w*|sav\w* start\w*)\b")
_ENDS = re.compile(
    r"(?i)\b(?:saved|finish\w* sav\w*|done sav\w*|sav\w* (?:is )?(?:done|finished|complete\w*|took)|save_\w+ done)\b"
)
_RESUMED = re.compile(r"(?i)\b(?:resum|restor|load)\w*\b.*?(?:checkpoint|step|ckpt)\D{0,12}(?P<step>\d{1,9})")
_FROM_ZERO = re.compile(
    r"(?i)\b(?:from|at|global)[ _](?:global[ _])?step\W{0,3}0\b(?!\.)"
    r"|(?:will skip|skipping)(?: the first)? 0 (?:epochs|batches)"
)
_TOTALS = re.compile(r"(?i)checksum|\bhash\b|digest|\bcrc|\bmd5|\bsha\d|fingerprint|\bnorm of\b|\bsum of\b")
_VALUE = re.compile(r"(?P<value>0x[0-9a-f]+|\b[0-9a-f]{8,64}\b|-?\d+\.\d+(?:e[+-]?\d+)?)\W*$", re.IGNORECASE)
_MEMORY = re.compile(r"(?i)(?P<value>\d+(?:\.\d+)?) ?(?P<unit>[GM]i?B)\b")
_DEVICE_ROW = re.compile(
    r"^\W*(?P<device>\d{1,2})\s+(?:N/A\s+N/A\s+)?(?P<pid>\d{2,9})\s+(?:C(?:\+G)?\s+)?\S.*?(?P<memory>\d+) ?MiB"
)
# A rank that has so many times the memory of the others.
_UNEVEN = 2.0
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
_TOTAL_WORDS = ("hecksum", "hash", "igest", "crc", "md5", "sha", "ingerprint", "norm of", "sum of")
_CHANGE_WORDS = ("oad", "esum", "estor", "ync", "update_weights", "eight update")
_HINTS = (
    *("loss", "grad_norm", "kl", "sav", "Sav", "emory", "MiB", "step 0", *_CHANGE_WORDS, *_TOTAL_WORDS),
    *(*_SYMPTOM_WORDS, *_ALONE_WORDS),
)
# Sources of a line that are ranks.
_RANKS = ("rank", "local rank", "task")
_MAX_TRACKED = 4_096
# So many names stand in a sentence.
_SHOWN = 8
# Decisions that several symptoms share.
_RESUME = "`fsdp-doctor resume -- COMMAND` runs the job without and with a resume, and names the differences."
_COMPARE_ENGINE = (
    "Do trainer and engine have the same weights after the sync? Compare `fsdp_doctor.fingerprint` of the model and "
    "of the weights that the engine got."
)


@dataclass
class _ByRank:
    """The values of one message by rank, and the lines that contain them."""

    values: dict[str, str] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)


class SymptomReader:
    """Finds symptoms in a log without exceptions. Call ``read`` with each piece of a file in order, then ``end``."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.found: Reading | None = None
        self.told: Reading | None = None
        self._before: dict[str, tuple[float, int]] = {}
        self._changed: tuple[int, str] | None = None
        self._told_load = False
        self._paths: dict[str, tuple[str, int]] = {}
        self._resumed: tuple[str, int] | None = None
        self._begun: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._last_saved: dict[str, int] = {}
        self._totals: dict[str, _ByRank] = {}
        self._memory: dict[str, _ByRank] = {}
        self._devices: dict[str, dict[str, int]] = {}
        self._keys: tuple[list[str], int] | None = None

    def read(self, piece: LogPiece) -> None:
        # Few of them are in a piece, and each is looked for in every line.
        hints = [hint for hint in _HINTS if self.found is None and hint in piece.text]
        if not hints:
            return
        alone = [hint for hint in hints if hint in _ALONE_WORDS]
        symptoms = [hint for hint in hints if hint in _SYMPTOM_WORDS]
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if self.found is not None:
                return
            may_be_alone = _has_any(alone, raw)
            is_symptom = _has_any(symptoms, raw)
            if may_be_alone or is_symptom or _has_any(hints, raw):
                self._read_line(number, raw, may_be_alone=may_be_alone, is_symptom=is_symptom)

    def end(self) -> Reading | None:
        """Compares the messages of the ranks after the end of the log, and returns the symptom that was found."""
        if self.found is None:
            self._compare_saves()
            self._compare_totals()
            self._compare_memory()
            self._compare_devices()
        return self.found

    def _read_line(self, number: int, raw: str, *, may_be_alone: bool, is_symptom: bool) -> None:
        """Looks for a symptom in one line.

        may_be_alone: whether the line has a word of a failure.
        is_symptom: whether the line has a word of a symptom.
        """
        self._read_figures(number, raw)
        names_save = "sav" in raw or "Sav" in raw
        names_total = _has_any(_TOTAL_WORDS, raw) and _TOTALS.search(raw) is not None
        names_memory = "emory" in raw or "MiB" in raw
        if not (may_be_alone or is_symptom or names_save or names_total or names_memory):
            return
        line = parse_line(number, raw)
        if names_save:
            self._compare_directories(number, line.text, line.source)
            self._count_save(number, line.text, line.source)
        if names_total or names_memory:
            self._read_value(number, line.text, line.source, names_memory=names_memory and not names_total)
        if "keys" in raw or "['" in raw:
            self._read_keys(number, line.text)
        if may_be_alone or is_symptom:
            for mechanism in read_mechanisms():
                is_meant = mechanism.symptom or (mechanism.alone and may_be_alone)
                if not is_meant or (found := apply_mechanism(mechanism, line.text)) is None:
                    continue
                if mechanism.told:
                    self.told = self.told or self._make_reading(*found, number)
                else:
                    self._find(*found, number)

    def _read_figures(self, number: int, raw: str) -> None:
        """Compares the figures of a line with those before the last load or sync."""
        figures: dict[str, float] = {}
        if "loss" in raw or "grad_norm" in raw or "kl" in raw:
            figures = {match["name"]: float(match["value"]) for match in _FIGURE.finditer(raw)}
        for name, value in figures.items():
            before, at = self._before.get(name, (0.0, 0))
            if self._changed and before and value > max(_JUMPS[name] * before, _SMALL[name]):
                changed_at, change = self._changed
                clash = f"{name} is {value:g} at the first step after {change}, but was {before:g} before it"
                self._find(clash, _RESUME if change == "a load" else _COMPARE_ENGINE, at, changed_at, number)
            self._before[name] = value, number
        if figures:
            self._changed = None
        if not _has_any(_CHANGE_WORDS, raw) and " from " not in raw and "step 0" not in raw:
            return
        is_load = _LOADED.search(raw) is not None
        if not figures and _SYNCED.search(raw):
            self._changed = number, "a sync of the weights"
        elif not figures and is_load:
            self._changed = number, "a load"
        self._told_load = self._told_load or is_load
        if (told := _TOLD.search(raw)) and self._told_load and float(told["b"]) > 1.5 * float(told["a"]):
            self._find(f"{told['name']} goes from {told['a']} to {told['b']} with a load", _RESUME, number)
        if self._resumed and number - self._resumed[1] < _NEAR and _FROM_ZERO.search(raw):
            step, at = self._resumed
            clash = f"the checkpoint is of step {step}, but the job goes on from step 0"
            self._find(clash, f"Which file has the step, and does the load read it? {_RESUME}", at, number)
        elif (resumed := _RESUMED.search(raw)) and int(resumed["step"]):
            self._resumed = resumed["step"], number

    def _compare_directories(self, number: int, text: str, source: str) -> None:
        """Compares the directories to which the ranks say that they save: two names mean two checkpoints."""
        saved, rank = _SAVED_TO.search(text), _RANK.search(text)
        source = source or (rank[0].strip("[]") if rank else "")
        if saved is None or not source or "rank" in saved["path"]:
            return
        path = saved["path"].rstrip("./")
        for other, (before, at) in self._paths.items():
            if other != source and _differ_in_one_part(before, path) and number - at < _NEAR:
                clash = f"{other} saves to {before}, and {source} to {path}"
                decide = (
                    "Do both paths belong to one checkpoint? If so, broadcast the name from rank 0; `fsdp-doctor "
                    "checkpoint verify DIRECTORY` says which ranks' files exist."
                )
                self._find(clash, decide, at, number)
        self._paths[source] = path, number

    def _count_save(self, number: int, text: str, source: str) -> None:
        name = _name_rank(text, source)
        if not name or len(self._last_saved) > _MAX_TRACKED:
            return
        if _ENDS.search(text):
            self._ended[name] += 1
        elif _BEGINS.search(text):
            self._begun[name] += 1
        else:
            return
        self._last_saved[name] = number

    def _compare_saves(self) -> None:
        """Compares the ranks that began the last save with the ranks that ended it."""
        most = max(self._begun.values(), default=0)
        begun = [rank for rank in self._begun if self._begun[rank] == most]
        ended = [rank for rank in begun if self._ended[rank] == most]
        missing = [rank for rank in begun if self._ended[rank] == most - 1]
        # One rank may write the checkpoint for all, and only it says so; but not if the others said so before.
        if not missing or not (len(ended) > 1 or (ended and most > 1)):
            return
        clash = f"{join_some(ended, _SHOWN)} ended the save, {join_some(missing, _SHOWN)} did not"
        decide = (
            f"Where is {missing[0]}? Run `py-spy dump --pid PID` there: a collective in a save needs all ranks. "
            "`fsdp-doctor checkpoint verify DIRECTORY` says whether the checkpoint is complete."
        )
        self._find(clash, decide, *sorted(self._last_saved[rank] for rank in (*ended[-1:], *missing[:1])))

    def _read_value(self, number: int, text: str, source: str, *, names_memory: bool) -> None:
        row = _DEVICE_ROW.match(text) if "MiB" in text else None
        if row is not None and len(self._devices) < _MAX_TRACKED:
            self._devices.setdefault(row["device"], {})[row["pid"]] = number
            return
        name = _name_rank(text, source)
        value = _MEMORY.search(text) if names_memory else _VALUE.search(text)
        if not name or value is None:
            return
        before, after = text[: value.start()], text[value.end() :]
        message = " ".join(_RANK.sub("", f"{before}{'' if names_memory else after}").split())
        tracked = self._memory if names_memory else self._totals
        if len(tracked) < _MAX_TRACKED:
            of_message = tracked.setdefault(message, _ByRank())
            if name not in of_message.values:
                of_message.values[name] = value[0] if names_memory else value["value"]
                of_message.lines.append(number)

    def _compare_totals(self) -> None:
        for message, by_rank in self._totals.items():
            values = Counter(by_rank.values.values())
            if len(by_rank.values) > 1 and 1 < len(values) < len(by_rank.values):
                usual = values.most_common(1)[0][0]
                others = [rank for rank, value in by_rank.values.items() if value != usual]
                other = by_rank.values[others[0]]
                said = message.strip(" :=")
                clash = (
                    f"the ranks differ in the same message ({said}): {join_some(others, _SHOWN)} has {other}, "
                    f"the others have {usual}"
                )
                decide = (
                    "Is the tensor whole on every rank? Then `fsdp_doctor.fingerprint(model)` on all ranks names each "
                    "tensor that differs: was it loaded only on some ranks, or not broadcast?"
                )
                self._find(clash, decide, by_rank.lines[0], by_rank.lines[-1])

    def _compare_memory(self) -> None:
        for message, by_rank in self._memory.items():
            sizes = {rank: _count_mib(text) for rank, text in by_rank.values.items()}
            if len(sizes) < 2:
                continue
            rank = max(sizes, key=lambda name: sizes[name])
            others = sorted(size for name, size in sizes.items() if name != rank)
            if sizes[rank] > _UNEVEN * others[-1] and sizes[rank] > 1024:
                clash = (
                    f"{rank} has {by_rank.values[rank]} ({message.strip(' :=')}), the others have at most "
                    f"{others[-1] / 1024:.3g} GiB"
                )
                decide = (
                    f"What does only {rank} hold: the whole model before it is sharded, a checkpoint that "
                    "`torch.load` put on its device (`map_location`), the tensors of other ranks? "
                    "`fsdp_doctor.examine(model, optimizer)` lists what each rank has."
                )
                self._find(clash, decide, by_rank.lines[0], by_rank.lines[-1])

    def _compare_devices(self) -> None:
        """Finds processes of other devices that also have memory on the first device, in a table of nvidia-smi."""
        first = self._devices.get("0", {})
        strange = [pid for pid in first if any(pid in pids for device, pids in self._devices.items() if device != "0")]
        if strange:
            clash = (
                f"GPU 0 holds memory of {len(strange)} processes of other devices (pid {', '.join(strange[:_SHOWN])}) "
                "next to that of rank 0"
            )
            decide = (
                "Does each rank call `torch.cuda.set_device(local_rank)` before anything else, and load with "
                "`map_location` (cpu, or its own device)? Otherwise every rank loads a file of cuda:0 onto cuda:0."
            )
            self._find(clash, decide, *sorted(first[pid] for pid in strange[:2]))

    def _read_keys(self, number: int, text: str) -> None:
        """Compares the names of two lists in one line, or in two lines near each other."""
        lists = find_keys(text)
        if len(lists) == 1 and self._keys is not None and number - self._keys[1] < _NEAR:
            lists = [self._keys[0], *lists]
        if len(lists) == 1:
            self._keys = lists[0], number
        elif len(lists) > 1 and (found := compare_keys(lists[0], lists[1])):
            self._find(*found, *([self._keys[1]] if self._keys else []), number)

    def _find(self, clash: str, decide: str, *numbers: int) -> None:
        self.found = self.found or self._make_reading(clash, decide, *numbers)

    def _make_reading(self, clash: str, decide: str, *numbers: int) -> Reading:
        lines = tuple(f"{self._file}, line {at}" for at in dict.fromkeys(numbers))
        return Reading(clash=clash, decide=decide, lines=lines)


def _name_rank(text: str, source: str) -> str:
    """Names the rank that wrote a line: its source if that is a rank, else the rank in the text; empty without any."""
    if source.startswith(_RANKS):
        return source
    rank = _RANK.search(text)
    return f"rank {rank['number']}" if rank else ""


def _has_any(words: Sequence[str], text: str) -> bool:
    # Quicker than any() with a generator, which most lines of a log would wait for.
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


def _differ_in_one_part(path: str, other: str) -> bool:
    """Returns whether two paths differ in exactly one part, like the paths of one save at two times."""
    parts, others = pathlib.PurePath(path).parts, pathlib.PurePath(other).parts
    different = [(a, b) for a, b in zip(parts, others, strict=False) if a != b]
    return len(parts) == len(others) and len(different) == 1 and not any("rank" in name for name in different[0])


def _count_mib(text: str) -> float:
    match = _MEMORY.search(text)
    return float(match["value"]) * (1024 if match["unit"].startswith("G") else 1) if match else 0.0
