"""What NCCL's watchdog writes when a collective does not end, and torch's own analysis of flight recorder dumps."""

from __future__ import annotations

import re

from fsdp_doctor.explain.collectives import Hang, Waiting, hang_of
from fsdp_doctor.explain.log_lines import Line, lines_in

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
_MOST_RANKS = 4_096
_MOST_CALLS = 40
_MOST_SAID = 4


class CollectiveReader:
    """Collects it from the chunks of one file, in order. The first time-out of a rank counts."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._stacks: dict[str, int] = {}
        self._said: list[str] = []
        self._culprits = 0
        self._last_rank: int | None = None

    def read(self, text: str, lines: list[str]) -> None:
        hints = [hint for hint in _HINTS if hint in text and (hint != " from " or self._stacks or _STACK in text)]
        for raw in lines if hints else ():
            if any(hint in raw for hint in hints):
                for line in lines_in(0, raw):
                    self._line(line)

    @property
    def waiting(self) -> list[Waiting]:
        return list(self._waiting.values())

    @property
    def said(self) -> list[str]:
        more = self._culprits - len(self._said)
        return [*self._said, f"And {more} more ranks."] if more > 0 else self._said

    def hang(self) -> Hang | None:
        return hang_of(self.waiting, self.said)

    def _line(self, line: Line) -> None:
        for match in _CULPRIT.finditer(line.text):
            self._culprits += 1
            if len(self._said) < _MOST_SAID:
                what = match[2].replace("_", " ").lower()
                self._said.append(f"Rank {match[1]} differs: {what}{': ' + match[3] if match[3] else ''}.")
        if (call := _CALL.match(line.text.strip())) and line.source in self._stacks:
            waiting = self._waiting[self._stacks[line.source]]
            if len(waiting.frames) < _MOST_CALLS:
                waiting.frames += (f'File "{call["file"]}", line {call["line"]}, in {call["function"]}',)
            return
        work, status = _WORK.search(line.text), _STATUS.search(line.text)
        rank = self._rank(line)
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

    def _rank(self, line: Line) -> int | None:
        if match := _RANK.search(line.text):
            rank = int(match[1])
        elif line.source.startswith("rank "):
            rank = int(line.source.removeprefix("rank "))
        else:
            return None
        return rank if rank in self._waiting or len(self._waiting) < _MOST_RANKS else None


def _read_work(waiting: Waiting, work: re.Match[str]) -> None:
    waiting.op = work["op"].strip("_").removesuffix("_BASE")
    waiting.number = int(work["number"]) if work["number"] else None
    waiting.sent, waiting.received = work["sent"] or work["shape"] or "", work["received"] or ""
    waiting.waited_s = int(work["waited"]) / 1000 if work["waited"] else None
