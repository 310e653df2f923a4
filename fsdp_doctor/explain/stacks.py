"""Reads the stacks of processes that hang: py-spy's output as text or JSON, and the output of Python's faulthandler."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain.hangs import Hang, Waiting, capitalize, name_waiting_ranks
from fsdp_doctor.explain.log_input import Line, LogPiece, parse_line
from fsdp_doctor.explain.places import find_function, find_package, name_called_function
from fsdp_doctor.explain.rank_lines import has_any

# Texts in the line above the frames of a thread, which most lines of a log do not have.
_HINTS = ("(idle", "(active", "(most recent call first)", "Process ")
_PROCESS = re.compile(r"\s{0,80}Process (?P<pid>\d{1,12}): \S")
_PYSPY_THREAD = re.compile(r'\s{0,80}Thread (?:0x)?[\da-fA-F]{1,16} \([\w+]{1,40}\)(?:: "(?P<name>[^"]{0,200})")?')
_PYSPY_FRAME = re.compile(r"\s{1,80}(?P<function>\S.{0,200}?) \((?P<file>[^()]{1,400}):(?P<line>\d{1,9})\)\s*$")
_FAULT_THREAD = re.compile(
    r"\s{0,80}(?P<current>Current thread|Thread) 0x[\da-f]{0,16}.{0,80}\(most recent call first\)"
)
_FAULT_FRAME = re.compile(r'\s{1,80}File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9}) in (?P<function>.{1,200})$')
_JSON = re.compile(rb'\s{0,20}\[\s{0,20}\{\s{0,20}"pid"\s{0,4}:')
_MAX_JSON = 32 << 20
_RANK_IN_NAME = re.compile(r"(?i)rank[-_. ]?(\d{1,6})(?!\d)")
# Lines of torchrun's summary: the rank of a process, and in the next line its id.
_RANK_OF = re.compile(r"\brank\s{0,20}: (\d{1,6}) \(local_rank")
_PID_OF = re.compile(r"\bexitcode\s{0,20}: -?\d{1,6} \(pid: (\d{1,12})\)")
_MAX_PROCESSES = 4_096
_MAX_THREADS = 256
_MAX_FRAMES = 200
_MAX_PLACES = 4
_MAIN = "MainThread"
# Processes of a job that are not ranks: torchrun itself, and the workers of data loaders and of torch.compile.
_NO_RANK = re.compile(
    r"torch/distributed/(?:elastic|launcher)/|torch/utils/data/_utils/worker\.py|_inductor/compile_worker/"
    r"|multiprocessing/(?:resource_tracker|forkserver)\.py"
)
_BACKWARD = re.compile(r"in \S*_engine_run_backward$")
_OF_TORCH_DISTRIBUTED = re.compile(r"\btorch/distributed/")
# Modules of Python in which a thread waits, or through which a program starts. py-spy omits their directory.
_OF_PYTHON = re.compile(
    r"(?:threading|selectors|socket|ssl|queue|subprocess|runpy|contextlib|functools|asyncio/\w+|multiprocessing/\w+"
    r"|concurrent/futures/\w+|importlib/\w+)\.py"
)
_COLLECTIVE = re.compile(r"(?:all|reduce)_?(?:gather|reduce|scatter|to_all)|broadcast|barrier|scatter")
_GATHERS = re.compile(r"all_?gather|full_tensor|unshard|state_dict|summon_full_params")
_REDUCES = re.compile(r"reduce_scatter|foreach_reduce")


@dataclass
class _Process:
    """The stacks of one process.

    rank: the rank; None if it is not known.
    threads: the frames of each thread by its name, the outermost frame first.
    """

    pid: int | None
    rank: int | None
    threads: dict[str, list[str]] = field(default_factory=dict)

    def find_stack(self) -> list[str]:
        """Returns the frames of the thread in which the rank waits.

        This is the main thread or, during a backward, the thread that autograd uses.
        """
        main = self.threads.get(_MAIN) or next(iter(self.threads.values()), [])
        if main and any(_BACKWARD.search(frame) for frame in main[-2:]):
            others = (frames for frames in self.threads.values() if frames is not main)
            return next((frames for frames in others if any(map(_OF_TORCH_DISTRIBUTED.search, frames))), main)
        return main


class StackReader:
    """Collects the stacks of processes from files; one file may have the stacks of several processes."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], _Process] = {}
        self._open: dict[str, _Process] = {}
        self._thread: dict[str, list[str]] = {}
        self._ranks: dict[int, int] = {}
        self._last_rank: int | None = None

    def begin(self, name: str) -> None:
        """Begins to read the file ``name``."""
        self._name = name
        self._open.clear()
        self._thread.clear()

    def read(self, piece: LogPiece) -> None:
        has_stacks = bool(self._open) or has_any(_HINTS, piece.text)
        if not has_stacks and "exitcode" not in piece.text:
            return
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            self._read_summary(raw)
            # Most lines of a log do not belong to a stack; this test of them takes only two searches.
            if has_stacks and (self._thread or has_any(_HINTS, raw)):
                self._read_line(parse_line(number, raw))

    def read_json(self, path: pathlib.Path) -> bool:
        """Reads a file with one or several outputs of ``py-spy dump --json``. Returns False for any other file.

        Raises UsageError if an output is incomplete.
        """
        try:
            if not path.is_file():
                return False
            with open(path, "rb") as file:
                begin = file.read(4096)
                if not _JSON.match(begin):
                    return False
                text = (begin + file.read(_MAX_JSON)).decode("utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        self.begin(str(path))
        for thread in _parse_threads(path, text):
            self._add_thread(thread)
        return True

    def find_hang(self) -> Hang | None:
        """Compares the stacks of the ranks. Returns their hang; None if there are no stacks of ranks."""
        stacks = [(process, process.find_stack()) for process in self._processes.values()]
        ranks = [(process, frames) for process, frames in stacks if frames and not any(map(_NO_RANK.search, frames))]
        numbers = [self._find_rank(process) for process, _ in ranks]
        are_ranks = None not in numbers and len(set(numbers)) == len(numbers)
        waiting = []
        for at, ((process, frames), rank) in enumerate(zip(ranks, numbers, strict=True)):
            is_rank = are_ranks and rank is not None
            number = rank if is_rank else at if process.pid is None else process.pid
            waiting.append(make_waiting(number or 0, frames, is_process=not is_rank))
        return describe_stacks(waiting)

    def _find_rank(self, process: _Process) -> int | None:
        if process.rank is not None or process.pid is None:
            return process.rank
        return self._ranks.get(process.pid)

    def _read_summary(self, raw: str) -> None:
        if match := _RANK_OF.search(raw):
            self._last_rank = int(match[1])
        elif self._last_rank is not None and (match := _PID_OF.search(raw)):
            self._ranks[int(match[1])] = self._last_rank

    def _read_line(self, line: Line) -> None:
        source, text = line.source, line.text
        if match := _PROCESS.match(text):
            self._open_process(source, int(match["pid"]), line.number)
        elif match := _PYSPY_THREAD.match(text):
            self._open_thread(source, match["name"] or "", line.number)
        elif match := _FAULT_THREAD.match(text):
            self._open_thread(source, _MAIN if match["current"] == "Current thread" else "", line.number)
        elif source in self._thread:
            frame = _PYSPY_FRAME.match(text) or _FAULT_FRAME.match(text)
            if frame is not None and len(self._thread[source]) < _MAX_FRAMES:
                self._thread[source].insert(0, _write_frame(frame["file"], frame["line"], frame["function"]))
            elif not text.strip() or not text[0].isspace():
                del self._thread[source]

    def _open_process(self, source: str, pid: int | None, number: int) -> _Process | None:
        name = _RANK_IN_NAME.search(pathlib.PurePath(self._name).name)
        rank = int(source.split()[1]) if source.startswith("rank ") else int(name[1]) if name else None
        process = _Process(pid, rank)
        # A later dump of a process replaces the earlier one.
        key = ("pid", pid) if pid is not None else (f"{self._name} {source}", number if rank is None else -1)
        if key not in self._processes and len(self._processes) >= _MAX_PROCESSES:
            return None
        self._processes[key] = self._open[source] = process
        return process

    def _open_thread(self, source: str, name: str, number: int) -> None:
        process = self._open.get(source) or self._open_process(source, None, number)
        if process is None or len(process.threads) >= _MAX_THREADS:
            self._thread.pop(source, None)
            return
        name = name or f"thread {len(process.threads)}"
        self._thread[source] = process.threads.setdefault(name, [])

    def _add_thread(self, thread: Mapping[str, Any]) -> None:
        pid, frames = thread.get("pid"), thread.get("frames")
        if not isinstance(pid, int) or not isinstance(frames, list):
            return
        source = f"pid {pid}"
        process = self._open.get(source) or self._open_process(source, pid, 0)
        if process is None or len(process.threads) >= _MAX_THREADS:
            return
        name = str(thread.get("thread_name") or f"thread {len(process.threads)}")
        process.threads[name] = [
            _write_frame(str(frame.get("filename"))[:400], str(frame.get("line"))[:9], str(frame.get("name"))[:200])
            for frame in reversed(frames[:_MAX_FRAMES])
            if isinstance(frame, dict)
        ]


def make_waiting(rank: int, frames: Sequence[str], *, is_process: bool = False) -> Waiting:
    """Describes where a rank waits. ``frames`` is the rank's stack, the outermost frame first.

    is_process: whether ``rank`` is the id of a process, because the rank is not known.
    """
    at = next((at for at in range(len(frames) - 1, -1, -1) if find_package(frames[at]) not in ("torch", "python")), -1)
    below = frames[at + 1 :]
    is_collective = any(map(_OF_TORCH_DISTRIBUTED.search, below))
    function = (name_called_function(below, "") if is_collective else "") or find_function(frames[-1])
    inner = next((name for frame in reversed(below) if _COLLECTIVE.search(name := find_function(frame))), function)
    collective = next((word for word, kind in (("ALLGATHER", _GATHERS), ("REDUCE_SCATTER", _REDUCES))
                       if any(map(kind.search, map(find_function, below)))), function.upper())  # fmt: skip
    return Waiting(
        rank=rank,
        is_process=is_process,
        op=function if inner == function else f"{function} ({inner})",
        collective=collective if is_collective else "none",
        frames=tuple(reversed(frames)),
    )


def describe_stacks(waiting: Sequence[Waiting]) -> Hang | None:
    """Compares the places in which the ranks wait. Returns their hang; None if there are no ranks."""
    if not waiting:
        return None
    ranks = sorted(waiting, key=lambda each: each.rank)
    inside: dict[tuple[str, str], list[Waiting]] = {}
    outside: list[Waiting] = []
    for each in ranks:
        if each.collective == "none":
            outside.append(each)
        else:
            inside.setdefault((each.op, each.calling_frame), []).append(each)
    return Hang(
        waiting=tuple(ranks),
        sentences=tuple(_describe(list(inside.values()), outside)),
        differs=len(inside) + bool(outside) > 1,
        by_stacks=True,
    )


def _describe(inside: Sequence[Sequence[Waiting]], outside: Sequence[Waiting]) -> Iterator[str]:
    """Yields sentences that say where the ranks are.

    inside: the ranks in a call of torch.distributed, by place.
    outside: the other ranks.
    """
    if outside and not inside:
        yield (
            f"{capitalize(name_waiting_ranks(outside))}: no call of torch.distributed is in the stack. Such a rank "
            "computes or reads, or it waits for its device, whose collectives no Python stack shows."
        )
        return
    waits = [" waits" if len(inside[0]) == 1 else " wait", *([""] * len(inside))]
    places = [
        f"{name_waiting_ranks(each)}{wait} in {each[0].op}"
        for each, wait in zip(inside[:_MAX_PLACES], waits, strict=False)
    ]
    more = f", the others at {len(inside) - _MAX_PLACES} more places" if len(inside) > _MAX_PLACES else ""
    if outside:
        where = outside[0].op if len({each.op for each in outside}) == 1 else "other code"
        verb, whose = ("is", "it does") if len(outside) == 1 else ("are", "they do")
        yield (
            f"{capitalize(', '.join(places))}{more}; {name_waiting_ranks(outside)} {verb} in {where}, outside of "
            f"torch.distributed. The others wait until {whose} the same call."
        )
    elif len(inside) > 1:
        same = "" if len({each[0].op for each in inside}) > 1 else ", called at different lines"
        yield f"{capitalize(', '.join(places))}{more}{same}: the ranks are in different calls."
        yield "Which condition, loop or exception leads them there?"
    else:
        yield f"{capitalize(places[0])}."
        yield (
            "A rank whose stack is not here has not reached this call; if all ranks are here, look at the network and "
            "the devices."
        )


def _write_frame(file: str, line: str, function: str) -> str:
    """Writes a frame in the form of a traceback, which names a function without its class."""
    path = f"/lib/python3/{file}" if _OF_PYTHON.fullmatch(file) else file
    return f'File "{path}", line {line}, in {function.rpartition(".")[2]}'


def _parse_threads(path: pathlib.Path, text: str) -> Iterator[Mapping[str, Any]]:
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        try:
            threads, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            raise UsageError(f"{path} begins like py-spy's output, but is not a complete JSON document") from None
        if isinstance(threads, list):
            yield from (thread for thread in threads if isinstance(thread, dict))
        position = len(text) - len(text[end:].lstrip())
