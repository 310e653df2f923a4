"""Describes a hang: the collective in which each rank waits, and where the ranks differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_doctor.explain.log_input import Line, LogPiece, split_lines

_MAX_PLACES = 4
_HINTS = ("WorkNCCL(", "NCCL work:", "last enqueued work:", "failed collective", "Culprit rank", " from ", "PG ID")
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<number>\d{1,18}), )?OpType=(?P<op>\w{1,60})(?:, TensorShape=\[(?P<shape>[^\]]{0,200})\])?"
    r"(?:, NumelIn=(?P<sent>\d{1,18}), NumelOut=(?P<received>\d{1,18}))?, Timeout\(ms\)=\d{1,12}\)"
    r"(?: ran for (?P<waited>\d{1,12}) milliseconds)?"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
_RANK = re.compile(r"\bRank (\d{1,9})\]")
_GROUP = re.compile(r"PG ID (?P<id>\w{1,60})(?: PG GUID \w{1,60}\((?P<name>[^)\n]{1,80})\))?")
_STACK = "Stack trace of the failed collective:"
_CALL = re.compile(r"#\d{1,4} (?P<function>\S{1,200}) from (?P<file>.{1,600}):(?P<line>\d{1,9})\s*$")
_CULPRIT = re.compile(r"Culprit rank (\d{1,9}); Error type: (\w{1,60})(?:, (.{1,400}?))?(?=, Culprit rank|$)")
_TORCH_OR_PYTHON = re.compile(r'/torch/|File "torch/|<frozen|/lib/python[\d.]+/(?!site-packages)')
_MAX_RANKS = 4_096
_MAX_CALLS = 40
_MAX_SENTENCES = 4


@dataclass(kw_only=True)
class Waiting:
    """One rank in a collective that did not end.

    group: the name of the process group.
    op: the operation, such as ALLGATHER; empty if it is not known.
    number: the number of the collective in its group.
    sent, received: the sizes of the input and of the output, as numbers of elements or as shapes.
    waited_s: the time that the rank waited, in seconds.
    enqueued, completed: the numbers of the last collectives that this rank launched and completed.
    entered: whether the rank reached the collective in which the others wait.
    frames: the frames of the call, innermost first.
    is_process: whether ``rank`` is the id of a process, because the rank is not known.
    collective: the operation of the collective, if ``op`` is the function that the job called; "none" if the stack has
        no call of torch.distributed.
    """

    rank: int
    group: str = ""
    op: str = ""
    number: int | None = None
    sent: str = ""
    received: str = ""
    waited_s: float | None = None
    enqueued: int | None = None
    completed: int | None = None
    entered: bool = True
    frames: tuple[str, ...] = ()
    is_process: bool = False
    collective: str = ""

    @property
    def calling_frame(self) -> str:
        """The innermost frame of the user's code, otherwise of a package other than torch; empty without either."""
        frames = [frame for frame in self.frames if not _TORCH_OR_PYTHON.search(frame)]
        return next((frame for frame in frames if "-packages/" not in frame), frames[0] if frames else "")

    @property
    def call(self) -> str:
        """The operation and its number, such as ``ALLGATHER 126``, as far as they are known."""
        number = self.number if self.number is not None else "" if self.completed is None else self.completed + 1
        return f"{self.op or 'collective'} {number}".strip()

    @property
    def group_size(self) -> int | None:
        """The number of ranks that gather or scatter together, computed from the sizes; None if the sizes do not
        determine it.
        """
        if not (self.sent.isdigit() and self.received.isdigit() and self.op in ("ALLGATHER", "REDUCE_SCATTER")):
            return None
        small, large = sorted((int(self.sent), int(self.received)))
        return large // small if small and large % small == 0 else None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang of collectives.

    waiting: the ranks that wait, sorted by group and rank.
    sentences: sentences for the user about where the ranks differ.
    differs: whether the ranks are in different places.
    by_stacks: whether the hang is known from the stacks of the ranks, which do not number the collectives.
    """

    waiting: tuple[Waiting, ...]
    sentences: tuple[str, ...]
    differs: bool
    by_stacks: bool = False


def make_hang(waiting: Iterable[Waiting], sentences: Sequence[str] = ()) -> Hang | None:
    """Makes the hang of the ranks that are known to wait; None if there are no ranks and no sentences.

    sentences: the findings of an analysis that the log already contains.
    """
    ranks = sorted(waiting, key=lambda rank: (rank.group, rank.rank))
    if not ranks and not sentences:
        return None
    sentence, differs = _compare(ranks) if ranks else ("", True)
    all_sentences = (*sentences, sentence) if sentence else tuple(sentences)
    return Hang(waiting=tuple(ranks), sentences=all_sentences, differs=differs or bool(sentences))


def name_ranks(ranks: Iterable[int], nouns: tuple[str, str] = ("rank", "ranks")) -> str:
    """Writes ranks as ``rank 3`` or ``ranks 0-3 and 5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = len(words) - 2 * _MAX_PLACES
    if more > 0:
        words = [*words[: 2 * _MAX_PLACES], f"{more} more"]
    is_single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{nouns[not is_single]} {' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def _compare(waiting: list[Waiting]) -> tuple[str, bool]:
    """Returns a sentence on where the ranks are, and whether they are in different places."""
    late = [rank for rank in waiting if not rank.entered]
    inside = [rank for rank in waiting if rank.entered]
    if late and inside:
        whose = "its" if len(late) == 1 else "their"
        last = f"{name_waiting_ranks(late)} never reached this call, and the last of {whose} calls is {late[0].call}"
        return f"{_describe_places(inside)}; {last}.", True
    if len({rank.call for rank in inside}) > 1:
        return f"{_describe_places(inside)}{_describe_delay(inside)}.", True
    sizes: dict[tuple[str, str], list[Waiting]] = {}
    for rank in waiting:
        sizes.setdefault((rank.sent, rank.received), []).append(rank)
    call = waiting[0].call
    if len(sizes) > 1:
        shares = [
            f"{name_waiting_ranks(ranks)} with {sent or '?'} in and {received or '?'} out"
            for (sent, received), ranks in list(sizes.items())[:_MAX_PLACES]
        ]
        return f"The ranks are in the same collective, {call}, with different sizes: {', '.join(shares)}.", True
    return _describe_same_place(waiting, call), False


def _describe_places(waiting: list[Waiting]) -> str:
    places: dict[str, list[Waiting]] = {}
    for rank in waiting:
        places.setdefault(rank.call, []).append(rank)
    shown = [
        f"{name_waiting_ranks(ranks)} {_choose_verb(ranks)} in {call}"
        for call, ranks in list(places.items())[:_MAX_PLACES]
    ]
    more = f", the others in {len(places) - _MAX_PLACES} more places" if len(places) > _MAX_PLACES else ""
    return capitalize(", ".join(shown) + more)


def _describe_delay(waiting: list[Waiting]) -> str:
    """Names the ranks that are behind, if all ranks are numbered in one group; empty otherwise."""
    numbers = [rank.number for rank in waiting if rank.number is not None]
    if len(numbers) < len(waiting) or len({rank.group for rank in waiting}) > 1 or min(numbers) == max(numbers):
        return ""
    behind = [rank for rank in waiting if rank.number == min(numbers)]
    return f": {name_waiting_ranks(behind)} {_choose_verb(behind)} {max(numbers) - min(numbers)} behind"


def _describe_same_place(waiting: list[Waiting], call: str) -> str:
    ranks = {rank.rank for rank in waiting}
    size = waiting[0].group_size
    missing = set(range(size or max(ranks) + 1)) - ranks
    verb = "waits" if len(ranks) == 1 else "wait"
    start = f"{capitalize(name_ranks(ranks))}{f' of a group of {size}' if size else ''} {verb} in {call}"
    if missing:
        absent = (
            f"the log says nothing about {name_ranks(missing)}: at least one of these ranks did not reach this call"
        )
        return f"{start}, and {absent}."
    if len(ranks) == 1 and not size:
        return f"{start}, and the log says nothing about the other ranks: one of them did not reach this call."
    return f"{start} with the same sizes: the ranks agree on this call, so look at the network and the devices."


def name_waiting_ranks(waiting: Sequence[Waiting]) -> str:
    """Names ranks as ``name_ranks`` does. If ranks are not known, names processes by their ids."""
    are_processes = any(rank.is_process for rank in waiting)
    return name_ranks((rank.rank for rank in waiting), ("process", "processes") if are_processes else ("rank", "ranks"))


def _choose_verb(waiting: Iterable[Waiting]) -> str:
    return "is" if len({rank.rank for rank in waiting}) == 1 else "are"


def capitalize(text: str) -> str:
    """Writes the first letter as a capital."""
    return text[0].upper() + text[1:]


# The watchdog, and torch's own analysis of dumps


class WatchdogReader:
    """Collects the watchdog's messages from pieces of files in order. Only the first time-out of each rank counts."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._stacks: dict[str, int] = {}
        self._sentences: list[str] = []
        self._culprits = 0
        self._last_rank: int | None = None

    def read(self, piece: LogPiece) -> None:
        text = piece.text
        hints = [hint for hint in _HINTS if hint in text and (hint != " from " or self._stacks or _STACK in text)]
        for raw in piece.lines if hints else ():
            if any(hint in raw for hint in hints):
                for line in split_lines(0, raw):
                    self._read_line(line)

    def find_hang(self) -> Hang | None:
        more = self._culprits - len(self._sentences)
        sentences = [*self._sentences, f"And {more} more ranks."] if more > 0 else self._sentences
        return make_hang(self._waiting.values(), sentences)

    def _read_line(self, line: Line) -> None:
        for match in _CULPRIT.finditer(line.text):
            self._culprits += 1
            if len(self._sentences) < _MAX_SENTENCES:
                kind = match[2].replace("_", " ").lower()
                self._sentences.append(f"Rank {match[1]} differs: {kind}{': ' + match[3] if match[3] else ''}.")
        if (call := _CALL.match(line.text.strip())) and line.source in self._stacks:
            waiting = self._waiting[self._stacks[line.source]]
            if len(waiting.frames) < _MAX_CALLS:
                waiting.frames += (f'File "{call["file"]}", line {call["line"]}, in {call["function"]}',)
            return
        work, status = _WORK.search(line.text), _STATUS.search(line.text)
        rank = self._find_rank(line)
        if rank is None and status:
            # A line that a terminal has broken goes on without its beginning.
            rank = self._last_rank
        self._last_rank = rank
        if rank is None:
            return
        if work or status or _STACK in line.text:
            waiting = self._waiting.setdefault(rank, Waiting(rank=rank))
            if work and not waiting.op:
                _read_work(waiting, work)
            if status and waiting.completed is None:
                waiting.enqueued, waiting.completed = int(status["enqueued"]), int(status["completed"])
            if not waiting.group and (group := _GROUP.search(line.text)):
                waiting.group = group["name"] or f"group {group['id']}"
            if _STACK in line.text and not waiting.frames:
                self._stacks[line.source] = rank

    def _find_rank(self, line: Line) -> int | None:
        """Returns the rank in the job from the line's prefix; without a prefix, the rank that the watchdog names.

        The watchdog's rank may be a rank within a group. Returns None if the line names no rank, or for too many ranks.
        """
        if line.source.startswith("rank "):
            rank = int(line.source.removeprefix("rank "))
        elif match := _RANK.search(line.text):
            rank = int(match[1])
        else:
            return None
        return rank if rank in self._waiting or len(self._waiting) < _MAX_RANKS else None


def _read_work(waiting: Waiting, work: re.Match[str]) -> None:
    waiting.op = work["op"].strip("_").removesuffix("_BASE")
    waiting.number = int(work["number"]) if work["number"] else None
    waiting.sent, waiting.received = work["sent"] or work["shape"] or "", work["received"] or ""
    waiting.waited_s = int(work["waited"]) / 1000 if work["waited"] else None
