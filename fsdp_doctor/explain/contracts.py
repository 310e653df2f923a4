"""Reads a failure by the call that failed: the needs of such a call, and which need the log makes doubtful."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from fsdp_doctor.explain.around import Around
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.places import find_function, shorten
from fsdp_doctor.explain.tables import compile_pattern, read_table, shows_any

# Scores of a need: for a sign in the message, for a sign that many messages have, for a circumstance in a sentence that
# says where the job does not fail, and for a circumstance elsewhere in the log.
_BY_MESSAGE, _BY_WORD, _BY_CONTRAST, _BY_CIRCUMSTANCE = 9, 1, 3, 2
# Additional score of a need with ``first``, if the message has a sign of it.
_FIRST = 4
# Number of characters; a shorter sign counts as a word that many messages have.
_SHORTEST_SIGN = 9
_MOST_NEEDS = 3
# Words of a job that shards a model, serves it in an engine, or runs on several ranks.
_SHARDED = re.compile(
    r"(?i)fsdp|fully[_ ]?shard|dtensor|shard|\branks?\b|distributed|accelerate|verl|v-?llm|sglang|megatron|torchtitan"
    r"|torchtune|lightning|nemo|skyrl|deepspeed|zero-?[123]|\b\d+ ?x? ?(?:gpus|npus|nodes|[hab]\d00)|torchrun|\btrl\b"
    r"|rollout|async|litgpt"
)
# A quoted name of a parameter or module: a name with dots, or a name behind a word such as "parameter" or "module".
_QUOTED = re.compile(
    r"""(?:(?:named|keys?|[Pp]arameter|[Mm]odule|weight|buffer|layer):? \(?['"`](?P<called>\w+(?:\.\w+)*)"""
    r"""|(?<!\w)['"`](?P<dotted>(?!torch\b|aten\b)[a-z]\w*(?:\.\w+)+))['"`]"""
)
_SENTENCE = re.compile(r"(?<=[.?])\s")
_CALL = re.compile(r"([A-Za-z_]\w*)\(")
_NAME = re.compile(r"\w+_\w+")
# Least lengths of the functions' names that are looked for in a message, and in the text around the exception.
_NAMED_IN_MESSAGE, _NAMED_IN_TEXT = 11, 16
# Depth at which a call counts if only the text around the exception names it.
_TOLD = 4
_FILE = re.compile(r'File "(?P<file>[^"]+)"')


class Need(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a call needs. ``contracts.toml`` explains the fields."""

    needs: str
    decide: str
    signs: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    first: bool = False


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of sharded training. ``contracts.toml`` explains the fields."""

    name: str
    when: str
    need: tuple[Need, ...]
    places: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    called: str = ""
    code: str = ""
    says: str = ""


class CallCircumstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A circumstance that makes a need doubtful. ``contracts.toml`` explains the fields."""

    noun: str
    shown: tuple[str, ...]


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generic: tuple[str, ...]
    circumstance: dict[str, CallCircumstance]
    operation: tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class CallContract:
    """A call of the traceback and its needs, the most doubtful first.

    named: the first parameter or module that the message quotes; empty if it quotes none.
    is_shown: whether the message shows that the first need is not met.
    is_doubtful: whether the log names a circumstance that makes the first need doubtful.
    comes_first: whether the first need says more than a mechanism of the message.
    """

    operation: Operation
    needs: tuple[Need, ...]
    named: str = ""
    nouns: tuple[str, ...] = ()
    is_shown: bool = False
    is_doubtful: bool = False
    comes_first: bool = False

    @property
    def clash(self) -> str:
        need = self.needs[0]
        if not (self.is_shown or self.is_doubtful):
            return f"it fails in {self.operation.name}"
        named = f" (the log names: {', '.join(self.nouns)})" if self.nouns else ""
        named += f"; the message names {self.named}" if self.named and self.is_shown else ""
        return f"{self.operation.name} needs {need.needs}{named}"

    @property
    def decide(self) -> str:
        if self.is_shown or self.is_doubtful:
            return self.needs[0].decide
        # The log shows none of the needs: each is a question.
        asked = self.needs[:_MOST_NEEDS]
        needs = "; ".join(f"({number}) {need.needs}" for number, need in enumerate(asked, 1))
        steps = (_SENTENCE.split(need.decide, maxsplit=1)[0] for need in asked)
        listed = " ".join(f"({number}) {step}" for number, step in enumerate(steps, 1))
        return f"This call needs {needs}. The log does not say which of these is missing: {listed}"


@functools.cache
def read_contracts() -> _Tables:
    return msgspec.convert(read_table("contracts.toml"), _Tables)


def read_contract(raised: Raised, around: Around) -> CallContract | None:
    """Returns the call that failed, with its needs; None if neither a frame nor a word shows a call of the table.

    A need that the message shows comes before a need that a circumstance makes doubtful. Of equal needs, the need of
    the innermost call comes first.
    """
    text = "" if raised.cut else " ".join((*raised.text.split(), raised.asserted))
    if _SHARDED.search("\n".join((around.text, text, *raised.frames, *raised.code_of.values()))) is None:
        return None
    shown = _find_circumstances(raised, around, text)
    best: tuple[int, int, Operation, Need] | None = None
    innermost: Operation | None = None
    for depth, operation in _find_operations(raised, text, set(_NAME.findall(around.text))):
        innermost = innermost or operation
        for need in operation.need:
            score = _score(need, text, shown)
            if score and (best is None or score - depth > best[0] - best[1]):
                best = score, depth, operation, need
    if best is not None:
        score, _, operation, need = best
        nouns = tuple(shown[name][0] for name in need.given if name in shown)
        return CallContract(
            operation=operation,
            needs=(need, *(other for other in operation.need if other is not need)),
            named=(match["called"] or match["dotted"]) if (match := _QUOTED.search(raised.message)) else "",
            nouns=nouns,
            is_shown=score >= _BY_MESSAGE,
            # A word that many messages have does not make a need doubtful by itself.
            is_doubtful=score > _BY_WORD,
            comes_first=need.first and score >= _BY_MESSAGE,
        )
    if innermost is None or len(innermost.need) == 1:
        return None
    return CallContract(operation=innermost, needs=innermost.need)


def _score(need: Need, text: str, shown: Mapping[str, tuple[str, bool]]) -> int:
    found = [match[0].lower() for sign in need.signs if (match := compile_pattern(sign).search(text))]
    is_clear = any(len(sign) >= _SHORTEST_SIGN and not shows_any(read_contracts().generic, sign) for sign in found)
    score = 0 if not found else _BY_MESSAGE + _FIRST if need.first else _BY_MESSAGE if is_clear else _BY_WORD
    return score + sum(_BY_CONTRAST if shown[name][1] else _BY_CIRCUMSTANCE for name in need.given[:2] if name in shown)


def _find_circumstances(raised: Raised, around: Around, text: str) -> dict[str, tuple[str, bool]]:
    """Finds the circumstances that the log names.

    Returns for each id (noun, whether a sentence on where the job does not fail names the circumstance).
    """
    frames = (f"{find_function(frame)} {_find_file(frame).rsplit('/', 1)[-1]}" for frame in raised.frames)
    where = " ".join(("in", *frames)) if any("in __init__" in frame for frame in raised.frames) else " ".join(frames)
    # Lines of torch are left out, because they name circumstances that the job need not have.
    code = (line for frame, line in raised.code_of.items() if "torch/" not in _find_file(frame))
    everything = "\n".join((around.text, text, where, *code))
    contrasts = "\n".join(around.contrasts)
    return {
        name: (circumstance.noun, shows_any(circumstance.shown, contrasts))
        for name, circumstance in read_contracts().circumstance.items()
        if shows_any(circumstance.shown, everything)
    }


def _find_operations(raised: Raised, text: str, told: Set[str]) -> Iterator[tuple[int, Operation]]:
    """Yields (depth, call) for the calls that the frames go through, innermost first, then for those in the message.

    told: the words of the text around the exception, which may name a function.
    """
    operations = read_contracts().operation
    found: set[str] = set()
    for depth, frame in enumerate(reversed(raised.frames)):
        for operation in operations:
            if operation.name not in found and _is_at(operation, frame, raised.code_of.get(frame, "")):
                found.add(operation.name)
                yield min(depth, 5), operation
    for operation in operations:
        if operation.name in found:
            continue
        named = _name_functions(operation, _NAMED_IN_MESSAGE).intersection(_NAME.findall(text))
        if named or (operation.says and re.search(operation.says, text)):
            yield 0, operation
        elif not _name_functions(operation, _NAMED_IN_TEXT).isdisjoint(told):
            yield _TOLD, operation


@functools.cache
def _name_functions(operation: Operation, shortest: int) -> frozenset[str]:
    """Names the operation's functions that a text does not name by chance, because they have a certain length."""
    functions = (name.strip() for place in operation.places for name in place.partition(":")[2].split(","))
    return frozenset(name for name in functions if "_" in name.strip("_") and len(name) >= shortest)


def _is_at(operation: Operation, frame: str, code: str) -> bool:
    """Returns whether a frame belongs to the operation."""
    if operation.code and (not code or re.search(operation.code, code) is None):
        return False
    places = (*operation.places, *operation.older)
    if not places and not operation.called:
        return bool(operation.code)
    function, file = find_function(frame), _find_file(frame)
    if operation.called and not file.startswith("torch/") and "/torch/" not in file:
        # A log may lack the function's frame, but have the line that calls it.
        called = (function, *_CALL.findall(code))
        if any(re.search(operation.called, name) for name in called):
            return True
    return any(_is_in(place, file, function) for place in places)


def _is_in(place: str, file: str, function: str) -> bool:
    path, _, functions = place.partition(":")
    at = f"/{file}".rfind(f"/{path}")
    if at < 0 or (not path.endswith("/") and not file.endswith(path)):
        return False
    names = [name.strip() for name in functions.split(",") if name.strip()]
    return not names or function in names


def _find_file(frame: str) -> str:
    match = _FILE.search(frame)
    file = match["file"].replace("\\", "/") if match else ""
    # Older releases have the modules of FSDP2 and DTensor in other directories.
    return file.replace("/_composable/fsdp/", "/fsdp/_fully_shard/").replace(
        "/distributed/_tensor/", "/distributed/tensor/"
    )


def write_contrast(around: Around) -> str:
    """Writes the sentences of the log that say where or since when the job does not fail; empty if there are none."""
    if not around.contrasts:
        return ""
    said = "; ".join(f'"{shorten(sentence)}"' for sentence in around.contrasts[:2])
    return f"The log compares ({said}): what differs there decides."


def write_setting(raised: Raised, around: Around) -> str:
    """Writes the setting that probably chooses the code that failed; empty if no setting shares a word with it."""
    code: Sequence[str] = [raised.code_of.get(frame, "") for frame in raised.frames[-1:]]
    if (found := around.find_setting(raised.frames, code)) is None:
        return ""
    return f"`{found[0]}` has the words of the code that failed (`{found[1]}`): does it run without this setting?"
