"""Messages of NCCL's watchdog and of torchrun about ranks, and of torch's own analysis of dumps."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from fsdp_doctor.explain.hangs import Hang, Waiting, make_hang
from fsdp_doctor.explain.log_input import Line, lines_in, parse_line, parse_time

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
_MAX_RANKS = 4_096
_MAX_CALLS = 40
_MAX_SENTENCES = 4
_SUMMARY_HEADING = "Root Cause (first observed failure)"
_SUMMARY_LINES = 12
_SUMMARY_RANK = re.compile(r"\brank\s*: (\d+)")
_SUMMARY_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")


class WatchdogReader:
    """Collects the watchdog's messages from the chunks of files, in order. The first time-out of a rank counts."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._stacks: dict[str, int] = {}
        self._sentences: list[str] = []
        self._culprits = 0
        self._last_rank: int | None = None

    def read(self, text: str, lines: list[str]) -> None:
        hints = [hint for hint in _HINTS if hint in text and (hint != " from " or self._stacks or _STACK in text)]
        for raw in lines if hints else ():
            if any(hint in raw for hint in hints):
                for line in lines_in(0, raw):
                    self._read_line(line)

    def hang(self) -> Hang | None:
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
        rank = self._rank_of(line)
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

    def _rank_of(self, line: Line) -> int | None:
        if match := _RANK.search(line.text):
            rank = int(match[1])
        elif line.source.startswith("rank "):
            rank = int(line.source.removeprefix("rank "))
        else:
            return None
        return rank if rank in self._waiting or len(self._waiting) < _MAX_RANKS else None


def _read_work(waiting: Waiting, work: re.Match[str]) -> None:
    waiting.op = work["op"].strip("_").removesuffix("_BASE")
    waiting.number = int(work["number"]) if work["number"] else None
    waiting.sent, waiting.received = work["sent"] or work["shape"] or "", work["received"] or ""
    waiting.waited_s = int(work["waited"]) / 1000 if work["waited"] else None


@dataclass
class FirstFailure:
    """The first failure that torchrun saw. exit_code: negative for a signal, None where it is not given."""

    rank: int
    exit_code: int | None = None
    time: float | None = None

    def is_one_of(self, sources: set[str]) -> bool:
        """Whether that rank is among them; srun's tasks are ranks where nothing else names them."""
        return bool({f"rank {self.rank}", f"task {self.rank}"} & sources)

    @property
    def sentence(self) -> str:
        return f"torchrun saw rank {self.rank} fail first" + (f", with {self.ended}" if self.ended else "")

    @property
    def ended(self) -> str:
        """How the process ended: a signal's name, an exit code, or nothing where torchrun gives none."""
        if self.exit_code is None:
            return ""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class SummaryReader:
    """Finds torchrun's summary in the chunks of one file, in order; of several the first one counts."""

    def __init__(self) -> None:
        self.first: FirstFailure | None = None
        self._remaining = 0
        self._time: float | None = None

    def read(self, text: str, lines: list[str]) -> None:
        if not self._remaining and (self.first is not None or _SUMMARY_HEADING not in text):
            return
        for raw in lines:
            if _SUMMARY_HEADING in raw and self.first is None:
                self._remaining, self._time = _SUMMARY_LINES, None
            elif self._remaining:
                self._remaining -= 1
                self._read_detail(parse_line(0, raw).text)

    def _read_detail(self, text: str) -> None:
        if text.lstrip().startswith("time"):
            self._time = parse_time(text)
        elif (match := _SUMMARY_RANK.search(text)) and self.first is None:
            self.first = FirstFailure(int(match[1]), time=self._time)
        elif (match := _SUMMARY_EXIT.search(text)) and self.first is not None:
            self.first.exit_code = int(match[1])
            self._remaining = 0
