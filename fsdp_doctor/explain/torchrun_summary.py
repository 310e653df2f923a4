"""torchrun's own summary at the end of a log: which rank failed first, when, and how its process ended."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from fsdp_doctor.explain.log_lines import parsed, time_of

_HEADING = "Root Cause (first observed failure)"
_LINES = 12
_RANK = re.compile(r"\brank\s*: (\d+)")
_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")


@dataclass
class FirstFailure:
    """The first failure that torchrun saw. ``exit_code``: negative for a signal, None where it is not said."""

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
        """How the process ended: a signal's name, an exit code, or nothing where torchrun does not say."""
        if self.exit_code is None:
            return ""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class SummaryReader:
    """Looks for the summary in the chunks of one file, in order; several agents write several, the first one counts."""

    def __init__(self) -> None:
        self.found: FirstFailure | None = None
        self._left = 0
        self._time: float | None = None

    def read(self, text: str, lines: list[str]) -> None:
        if not self._left and (self.found is not None or _HEADING not in text):
            return
        for raw in lines:
            if _HEADING in raw and self.found is None:
                self._left, self._time = _LINES, None
            elif self._left:
                self._left -= 1
                self._detail(parsed(0, raw).text)

    def _detail(self, text: str) -> None:
        if text.lstrip().startswith("time"):
            self._time = time_of(text)
        elif (match := _RANK.search(text)) and self.found is None:
            self.found = FirstFailure(int(match[1]), time=self._time)
        elif (match := _EXIT.search(text)) and self.found is not None:
            self.found.exit_code = int(match[1])
            self._left = 0
