"""Reads facts from the log about a failure or a symptom for which the catalogue has no certain entry."""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.log_input import LogPiece, parse_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# By the innermost frame that says it. Who raised it, and in which phase of a job.
_WHO = (
    (r"\bbitsandbytes/", "bitsandbytes"),
    (r"\bsafetensors/", "safetensors"),
    (r"/(?:vllm|sglang)/", "the inference engine"),
    (r"\btorch/distributed/checkpoint/", "torch's distributed checkpoint"),
    (r"\btorch/distributed/(?:fsdp/_fully_shard|_composable)/", "torch's FSDP2"),
    (r"\btorch/distributed/fsdp/", "torch's FSDP1"),
    (r"\btorch/distributed/_?tensor/", "torch's DTensor"),
    (r"\btorch/optim/", "torch's optimizer"),
    (r"-packages/(?!torch/)(?P<name>\w+)/", ""),
)
_WHEN = (
    (r"model_merger|in \w*(?:merge_(?:and|fsdp|weights)|consolidate)\w*", "a merge of saved shards"),
    (r"in __setstate__", "a load"),
    (
        r"(?:optim|adam|shampoo|muon)\w*(?:/\w+)?\.py.* in (?:__init__|_instantiate\w*|add_param_group)",
        "the construction of the optimizer",
    ),
    (r"in \w*clip_grad\w*|in get_total_norm", "gradient clipping"),
    (r"\btorch/optim/|optim\w*\.py.*in (?:update_)?step|in optimizer_step", "the optimizer's step"),
    (r"in (?:_?save\w*|async_save)|state_dict_saver", "a save"),
    (r"in \w*(?:load_state_dict|load_checkpoint|restore|resume)\w*|state_dict_loader|in create_\w*load_plan", "a load"),
    (r"in \w*(?:update_weight|sync_weight|send_weight|load_weights)\w*", "a sync of weights to an engine"),
    (r"in \w*(?:state_dict|full_tensor|summon_full_params)\w*", "a gather of the model"),
    (r"in backward|in _engine_run_backward|in _post_backward", "the backward"),
    (r"in (?:fully_shard|_init_\w*|__init__|wrap|build\w*)$", "the construction of the model"),
    (r"in forward|in _call_impl", "the forward"),
)
_LOADED = re.compile(r"(?i)\b(?:resum\w*|load(?:ed|ing)|restored)\b")
_FIGURE = re.compile(r"\b(?P<name>loss|grad_norm)['\"]?\s?[:=]?\s?(?P<value>\d{1,9}(?:\.\d{1,9})?)")
_SAVED_TO = re.compile(r"(?i)\bsav\w+\b.*?(?P<path>/[\w./-]{3,300})")
_RANK = re.compile(r"\[?\brank ?\d{1,6}\b\]?")
# Within so many lines two ranks save the same checkpoint.
_NEAR = 64
# By how much the first figure after a load is above the last before it, where it is no noise.
_JUMPS = {"loss": 1.5, "grad_norm": 8.0}
# Each mechanism of a symptom needs one of them, and looking for a word is a tenth of looking for a pattern.
_SYMPTOM_WORDS = (
    *("newly initialized", "diff", "empty for", "keys", "nan", "NaN", "grad_norm"),
    *("gibberish", "garbled", "!!!!!!!!", "stuck", "hang"),
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
_HINTS = ("loss", "grad_norm", "esum", "oad", "estored", "sav", "Sav", *_SYMPTOM_WORDS, *_ALONE_WORDS)


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which two facts of a job contradict each other. ``mechanisms.toml`` explains the fields."""

    shown: tuple[re.Pattern[str], ...]
    clash: str
    decide: str
    symptom: bool = False
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Facts that the log shows about a failure or a symptom.

    clash: the contradiction, as a sentence without its full stop; empty if none was recognized.
    decide: the command or the question that would lead to the cause; empty if there is none.
    who: the library that raised the exception; empty if no frame shows it.
    when: the phase of the job; empty if no frame shows it.
    lines: the places in the log from which these facts were read.
    """

    clash: str
    decide: str
    who: str = ""
    when: str = ""
    lines: tuple[str, ...] = ()


@functools.cache
def read_mechanisms() -> tuple[Mechanism, ...]:
    table = tomllib.loads(pathlib.Path(__file__).with_name("mechanisms.toml").read_text(encoding="utf-8"))
    return tuple(
        msgspec.convert(row, Mechanism, dec_hook=lambda _, text: re.compile(text)) for row in table["mechanism"]
    )


def read_failure(raised: Raised) -> Reading | None:
    """Returns the facts about one exception; None if neither its message nor its frames show any."""
    text = " ".join((*raised.text.split(), raised.asserted))
    clash, decide = next(
        (found for mechanism in read_mechanisms() if not mechanism.symptom and (found := _apply(mechanism, text))),
        ("", ""),
    )
    who, when = (_find_place(table, raised.frames) for table in (_WHO, _WHEN))
    if not (clash or who or when):
        return None
    return Reading(clash=clash, decide=decide, who=who, when=when, lines=(f"{raised.file}, line {raised.line}",))


def _apply(mechanism: Mechanism, text: str) -> tuple[str, str] | None:
    match = next((match for pattern in mechanism.shown if (match := pattern.search(text))), None)
    if match is None:
        return None
    facts = {name: value or "" for name, value in match.groupdict().items()}
    a, b = facts.get("a", ""), facts.get("b", "")
    if a.isdecimal() and b.isdecimal():
        facts["difference"] = str(abs(int(a) - int(b)))
    return mechanism.clash.format_map(facts), mechanism.decide.format_map(facts)


def _find_place(table: Sequence[tuple[str, str]], frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for pattern, words in table:
            if match := re.search(pattern, frame):
                return words or match["name"]
    return ""


class SymptomReader:
    """Finds the first symptom in a log without exceptions. Call ``read`` with the pieces of one file in order."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.found: Reading | None = None
        self._before: dict[str, tuple[float, int]] = {}
        self._loaded: int | None = None
        self._paths: dict[str, tuple[str, int]] = {}

    def read(self, piece: LogPiece) -> None:
        # Few of them are in a piece, and each is looked for in every line.
        hints = [hint for hint in _HINTS if self.found is None and hint in piece.text]
        if not hints:
            return
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if self.found is None and any(hint in raw for hint in hints):
                self._read_line(number, raw, hints)

    def _read_line(self, number: int, raw: str, hints: Sequence[str]) -> None:
        """Looks for a symptom in one line.

        hints: the hints that occur anywhere in the piece.
        """
        figures = {}
        if "loss" in raw or "grad_norm" in raw:
            figures = {match["name"]: float(match["value"]) for match in _FIGURE.finditer(raw)}
        for name, value in figures.items():
            before, at = self._before.get(name, (0.0, 0))
            if self._loaded is not None and before and value > _JUMPS[name] * before:
                clash = f"{name} is {value:g} at the first step after a load, but was {before:g} before the load"
                decide = (
                    "`fsdp-doctor resume -- COMMAND` runs the job without and with a resume, and names the differences."
                )
                self._find(clash, decide, at, self._loaded, number)
            self._before[name] = value, number
        if figures:
            self._loaded = None
        elif _LOADED.search(raw):
            self._loaded = number
        may_be_alone = any(hint in raw for hint in hints if hint in _ALONE_WORDS)
        is_symptom = any(hint in raw for hint in hints if hint in _SYMPTOM_WORDS)
        names_save = "sav" in raw or "Sav" in raw
        if not (may_be_alone or is_symptom or names_save):
            return
        line = parse_line(number, raw)
        if names_save:
            self._compare_directories(number, line.text, line.source)
        if may_be_alone or is_symptom:
            for mechanism in read_mechanisms():
                is_meant = mechanism.symptom or (mechanism.alone and may_be_alone)
                if is_meant and (found := _apply(mechanism, line.text)):
                    self._find(*found, number)

    def _compare_directories(self, number: int, text: str, source: str) -> None:
        """Finds two ranks that save to different names in one directory, and so write two checkpoints."""
        saved, rank = _SAVED_TO.search(text), _RANK.search(text)
        source = source or (rank[0].strip("[]") if rank else "")
        if saved is None or not source or "rank" in saved["path"]:
            return
        path = saved["path"].rstrip("./")
        for other, (before, at) in self._paths.items():
            is_beside = pathlib.PurePath(before).parent == pathlib.PurePath(path).parent
            if other != source and before != path and is_beside and number - at < _NEAR:
                clash = f"{other} saves to {before}, and {source} to {path}"
                decide = (
                    "Do both paths belong to one checkpoint? If so, broadcast the name from rank 0; `fsdp-doctor "
                    "checkpoint verify DIRECTORY` says which ranks' files exist."
                )
                self._find(clash, decide, at, number)
        self._paths[source] = path, number

    def _find(self, clash: str, decide: str, *numbers: int) -> None:
        self.found = self.found or Reading(
            clash=clash, decide=decide, lines=tuple(f"{self._file}, line {at}" for at in numbers)
        )
