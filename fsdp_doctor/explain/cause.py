"""Finds the cause among the exceptions of a log, the cause's consequences, and its entry in the catalogue."""

from __future__ import annotations

import functools
import pathlib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from fsdp_doctor.explain.exceptions import ExceptionReader, Raised
from fsdp_doctor.explain.flight_recorder import Dump, find_waiting_ranks, read_dump
from fsdp_doctor.explain.hangs import Hang, WatchdogReader, make_hang
from fsdp_doctor.explain.log_input import LogInput, LogPiece, parse_line
from fsdp_doctor.explain.mechanisms import Reading
from fsdp_doctor.explain.noted_lines import NotedLines
from fsdp_doctor.explain.places import JobCall, RaisingPlace, find_call, find_package, find_raising_place, is_same_place
from fsdp_doctor.explain.prose import ProseReader
from fsdp_doctor.explain.reading import (
    read_failure,
    read_hang,
    read_other_failure,
    read_symptom,
    read_version_clash,
)
from fsdp_doctor.explain.stacks import StackReader, describe_stacks, make_waiting
from fsdp_doctor.explain.symptoms import SymptomReader
from fsdp_doctor.explain.tables import read_table
from fsdp_doctor.explain.topics import write_topic
from fsdp_doctor.explain.versions import VersionReader
from fsdp_doctor.known import signatures
from fsdp_doctor.known.catalogue import KnownFailure, has_signature
from fsdp_doctor.known.clues import ClueName, LogClues
from fsdp_doctor.known.grading import ASK_FOR_PLACE, Evidence, Grade, Match, match_evidence
from fsdp_doctor.verdict.classification import fold

Showing: TypeAlias = Literal["failure", "hang", "consequences", "cut", "nothing"]

# Messages of the kernel, Slurm and Ray about a process that they killed for lack of host memory.
_KILLED_FOR_MEMORY = re.compile(
    r"invoked oom-killer|\boom-kill:constraint|\boom_kill events?\b|[Oo]ut of memory: Killed process \d"
    r"|\bOOM[ -]?Killed|node running low on memory|killed due to memory pressure"
)
_HINTS_OF_KILLERS = ("oom-kill", "oom_kill", "OOM", "Killed process", "running low on memory", "memory pressure")
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_ZEROS = str.maketrans("123456789", "0" * 9)
_MAX_GROUPS = 2_000
_MAX_SOURCES = 4_096
# Greatest number of places at which exceptions with the same message count as different failures.
_MAX_PLACES = 32
# A message of fewer words says little of a failure.
_FEWEST_WORDS = 3
# In how many exceptions of a group the line of the job that led there is looked for.
_MAX_CALLS = 16
_SUMMARY_HEADING = "Root Cause (first observed failure)"
_SUMMARY_LINES = 12
_SUMMARY_RANK = re.compile(r"\brank\s*: (\d+)")
_SUMMARY_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")
# Names of FSDP, DTensor and sharded checkpoints, in a message or in the place where it was raised.
_FSDP = re.compile(
    r"torch/distributed/(?:fsdp|_composable|_?tensor/|checkpoint/|_shard|_state_dict_utils)|DTensor|FSDP|FullySharded"
    r"|fully_shard|full_tensor|flat_param|_fsdp_|_OptimStateKey|ShardedTensor|summon_full_params|optim_state_dict"
    r"|torch\.distributed\.(?:checkpoint|tensor)|checkpoint state_dict|CheckpointException|\.distcp\b"
    r"|SHARDED_STATE_DICT|cross-mesh|[Dd]evice ?[Mm]esh|_extra_state"
)
_OTHER_SHARDING = "another library's sharding (DeepSpeed, Megatron, fairscale, XLA)"
_OF_DTENSORS = re.compile(r"to_local\b|full_tensor|DTensor|FSDP|fully_shard")
# Failures that are raised wherever the program happens to be, so that the traceback says nothing: a kernel fails later
# than it is launched, and every write to a full disk fails.
_ANYWHERE = re.compile(r"device-side assert|No space left on device|Disk quota exceeded|Read-only file system")
_INNERMOST = 3
_CALLS = ("in forward", "in _call_impl", "in _wrapped_call_impl")
_GATHERING = re.compile(r"state_dict|full_tensor|summon_full_params|save_pretrained|save_model|save_checkpoint")
_SENDING = re.compile(r"\b(?:send_weights|packed_\w{1,40}_producer|update_weights\w{0,40})\b")


def _load_kinds(table: str) -> dict[str, list[re.Pattern[str]]]:
    tables = read_table("message_kinds.toml")
    return {name: [re.compile(pattern) for pattern in patterns] for name, patterns in tables[table].items()}


_FOREIGN = _load_kinds("foreign")
_FSDP_FRAME = re.compile(r"\btorch/distributed/(?:_composable/)?fsdp/")
_FOREIGN_PLACES = _load_kinds("foreign_places")
_UNDECIDED = _load_kinds("undecided")
_CONSEQUENCES = _load_kinds("consequences")
_CARRIERS = _load_kinds("carriers")
# The consequence of a call that no other rank joined.
_TIMED_OUT = "a rank timed out while it waited for another"
# The consequences of a hang. A scheduler, a person or `timeout` ends a job that hangs.
_OF_HANGS = frozenset({
    _TIMED_OUT,
    "NCCL's watchdog ended a collective that another rank did not join",
    "NCCL's watchdog got stuck itself, mostly in a call of CUDA that hangs",
    "the process was ended from outside",
})  # fmt: skip
# Exceptions that only a mistake in a line of code raises, and words of what a script may say of its sharded model.
_MISTAKES = frozenset({"NameError", "UnboundLocalError", "ZeroDivisionError", "SyntaxError", "IndentationError"})
_OF_TENSORS = re.compile(
    r"(?i)tensor|shard|state|param|device|rank|mesh|checkpoint|ckpt|weight|grad|optim|dtype|shape|size|dim|storage|cuda"
    r"|nccl|model|[A-Za-z_]\.[A-Za-z_0-9]+\."
)


@dataclass
class FirstFailure:
    """The first failure that torchrun saw.

    exit_code: the exit code of the process, negative for a signal; None if torchrun printed no exit code.
    """

    rank: int
    exit_code: int | None = None

    def is_one_of(self, sources: set[str]) -> bool:
        """Returns whether the rank that failed first is among the sources.

        ``task N``, as srun names its processes, is taken for rank N.
        """
        return bool({f"rank {self.rank}", f"task {self.rank}"} & sources)

    @property
    def sentence(self) -> str:
        return f"torchrun saw rank {self.rank} fail first" + (f", with {self.ended}" if self.ended else "")

    @property
    def ended(self) -> str:
        """Describes how the process ended: a signal's name, an exit code, or nothing if torchrun did not print an exit
        code.
        """
        if self.exit_code is None:
            return ""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class SummaryReader:
    """Finds torchrun's summary in one file, whose pieces must be read in order. Later summaries are ignored."""

    def __init__(self) -> None:
        self.first: FirstFailure | None = None
        self._remaining = 0

    def read(self, piece: LogPiece) -> None:
        if not self._remaining and (self.first is not None or _SUMMARY_HEADING not in piece.text):
            return
        for raw in piece.lines:
            if _SUMMARY_HEADING in raw and self.first is None:
                self._remaining = _SUMMARY_LINES
            elif self._remaining:
                self._remaining -= 1
                self._read_detail(parse_line(0, raw).text)

    def _read_detail(self, text: str) -> None:
        if (match := _SUMMARY_RANK.search(text)) and self.first is None:
            self.first = FirstFailure(int(match[1]))
        elif (match := _SUMMARY_EXIT.search(text)) and self.first is not None:
            self.first.exit_code = int(match[1])
            self._remaining = 0


@dataclass
class Group:
    """Exceptions with the same message that were raised at the same place, by any ranks.

    signed: whether an entry of the catalogue has a signature in the message.
    matches: the entries of the catalogue that the exception may be, filled in after the whole log was read.
    consequence: the kind of consequence, if the exception follows from a failure elsewhere; empty otherwise.
    carries: whether the message repeats an exception of another rank. The exception is then a consequence, unless every
        group of the log is a consequence.
    sources: the ranks or processes that raised the exception.
    call: the line of the job that led to the exception on any of these sources.
    frames: the frames of the first exception of the group that has frames.
    key: the message without the parts that differ between ranks.
    """

    first: Raised
    signed: bool
    consequence: str
    carries: bool = False
    frames: Sequence[str] = ()
    key: str = ""
    matches: tuple[Match, ...] = ()
    sources: set[str] = field(default_factory=set)
    count: int = 0
    call: JobCall | None = None

    def add(self, raised: Raised) -> None:
        self.count += 1
        self.frames = self.frames or raised.frames
        if self.call is None and self.count <= _MAX_CALLS:
            self.call = find_call(raised)
        if len(self.sources) < _MAX_SOURCES:
            self.sources.add(raised.source)
        if raised is self.first:
            return
        other = raised
        if _is_earlier(raised, self.first) or (self.first.quoted and not raised.quoted):
            self.first, other = raised, self.first
        # If one traceback shows that it was raised elsewhere, a script only raised it again.
        if other.frames and not other.script:
            self.first.script = ""
        # Of the same failure, the longest traceback says most.
        if len(other.frames) > len(self.first.frames) or (other.code and not self.first.code):
            self.first.frames, self.first.code = other.frames or self.first.frames, other.code
            self.first.code_of = other.code_of or self.first.code_of

    @functools.cached_property
    def place(self) -> RaisingPlace | None:
        """The place where the exceptions of the group were raised; only for a group with frames."""
        return find_raising_place(self.frames)

    @property
    def doubt(self) -> tuple[bool, ...]:
        """Returns a sort key: the smaller it is, the more likely is this exception the cause.

        An exception that a program handled has a larger key.
        """
        first = self.first
        is_bare = not first.frames
        is_unknown = not any(match.grade != "possible" for match in self.matches)
        return first.cut, first.quoted, first.logged and is_bare, first.follows, is_unknown, first.swallowed, is_bare


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of reading the logs.

    showing: the main content of the logs: a failure; a hang; only consequences of a failure elsewhere; only tracebacks
        that were cut off; or none of these.
    cause: the exception from which the others followed; None if the logs have no exception.
    matches: the entries of the catalogue that the failure may be, the surest first.
    about_fsdp: whether the failure names FSDP, a DTensor or a sharded checkpoint.
    under_fsdp: whether the failure or any other part of the logs shows that FSDP is in use.
    foreign: a noun for the cause if it is known and is not FSDP; empty otherwise.
    about: a noun for what failed, if the failure is not about FSDP and its message names it; empty otherwise.
    noted: sentences that quote lines which are no exceptions: an error line, a warning of torch's sharding.
    reading: facts that the logs show about a failure without a certain entry; None if there are none.
    hang: the places of the ranks, if collectives did not end.
    consequences: the number of exceptions that followed from the cause, by the name of the consequence.
    others: the exceptions that are neither the cause nor a consequence, in order.
    summary: the first failure in torchrun's summary; None without a summary.
    dropped: the number of exceptions that were not kept because there were too many.
    truncated: the files that were not read to their end.
    dumps: the number of files that were dumps of a flight recorder.
    killed_for_memory: the place in the logs that tells of a process killed for lack of host memory; empty if there is
        none.
    torch: the version of torch that the logs name; empty if the logs name no version.
    versions: maps packages to the versions that the logs name.
    clues: the facts about the run that the logs show.
    """

    showing: Showing
    cause: Group | None = None
    matches: tuple[Match, ...] = ()
    about_fsdp: bool = False
    under_fsdp: bool = False
    foreign: str = ""
    about: str = ""
    noted: tuple[str, ...] = ()
    reading: Reading | None = None
    hang: Hang | None = None
    consequences: dict[str, int] = field(default_factory=dict)
    others: tuple[Raised, ...] = ()
    summary: FirstFailure | None = None
    dropped: int = 0
    truncated: tuple[str, ...] = ()
    dumps: int = 0
    killed_for_memory: str = ""
    torch: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    clues: frozenset[ClueName] = frozenset()

    @property
    def may_hang(self) -> bool:
        """Returns whether the logs show only consequences, of which the first can be the consequence of a hang."""
        return self.cause is not None and self.cause.consequence in _OF_HANGS

    @property
    def grade(self) -> Grade | None:
        """The grade of the surest match; None if nothing matches."""
        return self.matches[0].grade if self.matches else None

    @property
    def entry(self) -> KnownFailure | None:
        """The entry of the catalogue that the failure certainly is; None if no entry is certain."""
        return self.matches[0].entry if self.grade == "known" else None


def explain(files: Sequence[pathlib.Path | None]) -> Explanation:
    """Reads logs and dumps of torch's flight recorder, each once, and explains the failure in them.

    Several files are taken for the files of several ranks: if every exception has a time stamp, the time stamps decide
    which exception came first.

    Raises UsageError for a file that is neither a log nor a dump.

    files: the paths; None for standard input.
    """
    logs = _Logs()
    for path in files:
        logs.read(path)
    return logs.explain()


class _Logs:
    """Collects the facts of all files. After the first 2,000 groups, a group needs a signature or a traceback to be
    kept.
    """

    def __init__(self) -> None:
        # The groups of each message.
        self._groups: dict[str, list[Group]] = {}
        self._group_count = 0
        self._dropped = 0
        self._clues = LogClues()
        self._versions = VersionReader()
        self._watchdog = WatchdogReader()
        self._stacks = StackReader()
        self._summary: FirstFailure | None = None
        self._dumps: list[Dump] = []
        self._truncated: list[str] = []
        self._killed_for_memory = ""
        self._symptom: Reading | None = None
        self._prose: Reading | None = None
        self._told = ""
        self._lines = NotedLines()

    def read(self, path: pathlib.Path | None) -> None:
        if path is not None and (dump := read_dump(path, len(self._dumps))) is not None:
            self._dumps.append(dump)
            return
        if path is not None and self._stacks.read_json(path):
            return
        log = LogInput(path)
        self._stacks.begin(log.name)
        reader, summaries, symptoms = ExceptionReader(log.name), SummaryReader(), SymptomReader(log.name)
        prose = ProseReader(log.name)
        for piece in log.read_pieces():
            if not self._killed_for_memory and any(hint in piece.text for hint in _HINTS_OF_KILLERS):
                lines = zip(piece.numbers, piece.lines, strict=True)
                numbers = (number for number, line in lines if _KILLED_FOR_MEMORY.search(line))
                self._killed_for_memory = next((f"{log.name}, line {number}" for number in numbers), "")
            self._add(reader.read(piece))
            summaries.read(piece)
            symptoms.read(piece)
            prose.read(piece)
            self._lines.read(log.name, piece)
            self._watchdog.read(piece)
            self._stacks.read(piece)
            self._clues.read(piece.text)
            self._versions.read(piece.text)
        self._add(reader.end())
        self._summary = self._summary or summaries.first
        self._symptom = self._symptom or symptoms.end()
        self._prose = self._prose or prose.end() or symptoms.told
        self._told = self._told or prose.text
        if log.truncated:
            self._truncated.append(log.name)

    def _add(self, exceptions: Iterable[Raised]) -> None:
        for raised in exceptions:
            key = _make_group_key(raised.text.split("\n", 1)[0].translate(_ZEROS))
            groups = self._groups.get(key, [])
            group = _choose_group(groups, raised)
            if group is None:
                signed = groups[0].signed if groups else has_signature(raised.text)
                limit = _MAX_GROUPS * (2 if signed or raised.frames else 1)
                if self._group_count >= limit:
                    self._dropped += 1
                    continue
                carried = _find_first_kind(_CARRIERS, raised.text)
                consequence = carried or _find_first_kind(_CONSEQUENCES, raised.text)
                group = Group(raised, signed, consequence, carries=bool(carried), key=key)
                self._groups.setdefault(key, []).append(group)
                self._group_count += 1
            group.add(raised)

    def _list_groups(self) -> list[Group]:
        return [group for groups in self._groups.values() for group in groups]

    def explain(self) -> Explanation:
        groups = _sort_groups(self._list_groups())
        hang = self._find_hang()
        if all(group.consequence for group in groups):
            for group in groups:
                group.consequence = "" if group.carries else group.consequence
        causes = [group for group in groups if not group.consequence]
        for group in causes:
            group.matches = tuple(match_evidence(self._collect_evidence(group))) if group.signed else ()
        first_failed = [group for group in causes if self._summary and self._summary.is_one_of(group.sources)]
        # sorted() keeps the order of groups that are equally likely.
        likeliest = sorted(first_failed or causes, key=lambda group: group.doubt)
        # A traceback that was cut off says less than what followed from it.
        whole = [group for group in likeliest if not group.first.cut]
        cause = next(iter([*whole, *(group for group in groups if group.consequence), *likeliest]), None)
        showing = _decide_showing(cause, hang)
        is_failure = cause is not None and showing == "failure"
        matches = cause.matches if cause is not None and is_failure else ()
        if showing == "hang" and hang is not None:
            matches = tuple(self._match_hang(hang))
        about_fsdp = cause is not None and self._is_about_fsdp(cause)
        text = cause.first.text if cause is not None and is_failure else ""
        foreign = _find_foreign_cause(cause.first) if cause is not None and is_failure and not about_fsdp else ""
        # Another library's sharding may be built on torch's, as another exception of the same log shows.
        if foreign == _OTHER_SHARDING and any(_OF_DTENSORS.search(group.first.text) for group in groups):
            foreign = ""
        return Explanation(
            showing=showing,
            cause=cause,
            matches=matches,
            about_fsdp=about_fsdp,
            under_fsdp=cause is not None and self._collect_evidence(cause).shows("fsdp"),
            foreign=foreign,
            about=_find_first_kind(_UNDECIDED, text) if is_failure and not about_fsdp else "",
            noted=tuple(self._note(cause, showing, is_open=is_failure and not foreign and not _is_sure(matches))),
            reading=self._read(cause, showing, matches, foreign, about_fsdp=about_fsdp),
            hang=hang,
            consequences=_count_consequences(groups, cause),
            others=tuple(group.first for group in causes if group is not cause and not (whole and group.first.cut)),
            summary=self._summary,
            dropped=self._dropped,
            truncated=tuple(self._truncated),
            dumps=len(self._dumps),
            killed_for_memory=self._killed_for_memory,
            torch=self._clues.torch,
            versions=self._versions.versions,
            clues=frozenset(self._clues.shown),
        )

    def _read(
        self,
        cause: Group | None,
        showing: Showing,
        matches: Sequence[Match],
        foreign: str,
        *,
        about_fsdp: bool,
    ) -> Reading | None:
        """Returns facts about an exception or a symptom; None if the catalogue knows the failure for certain."""
        if any(match.grade == "known" for match in matches):
            return None
        if showing == "hang":
            return read_hang(self._told)
        if showing == "consequences":
            return None
        if cause is None:
            return read_symptom(self._symptom or self._prose, self._told)
        versions = {"torch": self._clues.torch, **self._versions.versions}
        if foreign:
            return read_version_clash(cause.first, versions)
        reading = read_failure(cause.first, versions, self._find_call(cause), self._told)
        # What a person says of another library's failure may be about anything.
        symptom = self._symptom or (self._prose if about_fsdp and not matches else None)
        if reading is None:
            reading = symptom
        elif reading.vague and symptom is not None:
            reading = replace(symptom, who=reading.who, when=reading.when, called=reading.called)
        if not matches and (reading is None or not reading.clash or len(cause.first.message.split()) < _FEWEST_WORDS):
            others = (group.first for group in self._list_groups() if group is not cause and not group.consequence)
            reading = read_other_failure(others, self._told) or reading
        if not about_fsdp or showing == "cut" or any(match.grade == "likely" for match in matches):
            return reading
        return self._add_command(reading, cause.first)

    def _note(self, cause: Group | None, showing: Showing, *, is_open: bool) -> Iterator[str]:
        """Yields sentences that quote an error line and, if the log shows nothing else, a warning of torch's sharding.

        The error line is the last one above the cause or, without a cause, the first one in the log. Yields nothing for
        a failure that is not open, unless its traceback was cut off.

        is_open: whether the failure has neither a sure entry nor a cause other than FSDP.
        """
        if not is_open and showing not in ("cut", "nothing"):
            return
        above = (cause.first.file, cause.first.line) if cause is not None else ()
        if error := self._lines.find_error(*above):
            kind = _find_first_kind(_FOREIGN, error.text)
            about = f" This line is about {kind}, which is no failure of FSDP's." if kind else ""
            yield f"An error line {'above it ' if above else ''}{error.quoted}.{about}"
        if showing == "nothing" and (warning := self._lines.warning):
            yield f"A warning of torch.distributed {warning.quoted}. Does the job do what it warns of?"

    def _add_command(self, reading: Reading | None, raised: Raised) -> Reading | None:
        """Adds to the reading the command that shows more about a word of the message, and returns the reading.

        If the reading is None, makes a reading. A reading that has a contradiction is returned unchanged.
        """
        topic = write_topic(raised.text)
        if not topic or (reading is not None and reading.clash):
            return reading
        if reading is None:
            reading = Reading(clash="", decide="", lines=(f"{raised.file}, line {raised.line}",))
        return replace(reading, decide=f"{reading.decide} {topic}".strip())

    def _find_call(self, cause: Group) -> JobCall | None:
        """Finds the line of the job that led to the cause, in the cause's traceback or in an exception that repeats it.

        Returns None if neither shows the line.
        """
        if cause.call is not None or not cause.first.frames:
            return cause.call
        carrying = (group for group in self._list_groups() if group.carries or group.first.chained)
        return next((group.call for group in carrying if group.call and group.sources & cause.sources), None)

    def _collect_evidence(self, group: Group) -> Evidence:
        first = group.first
        same_message = self._groups[group.key]
        return Evidence(
            message=first.text,
            traceback="\n".join(first.frames),
            script=first.script,
            code=first.code,
            ranks=len(set().union(*(each.sources for each in same_message)) - {""}),
            indirect=first.quoted,
            log=self._clues.shown,
            torch=self._clues.torch,
        )

    def _find_hang(self) -> Hang | None:
        """Finds the hang in the first source that shows one; None if no source shows a hang.

        The sources are dumps, messages of the watchdog, stacks of the ranks, and tracebacks of ranks that timed out.
        The last two count only if no exception of the log can be a cause.
        """
        from_dumps = make_hang(find_waiting_ranks(self._dumps)) if self._dumps else None
        if hang := from_dumps or self._watchdog.find_hang():
            return hang
        # The stacks of a process that crashed do not show a hang.
        only_followed = all(group.consequence or group.first.cut for group in self._list_groups())
        return (self._stacks.find_hang() or self._find_timed_out()) if only_followed else None

    def _find_timed_out(self) -> Hang | None:
        """Finds the places of all ranks, from their tracebacks, if one rank timed out; None if no rank timed out."""
        groups = self._list_groups()
        if not any(_is_timeout(group) for group in groups):
            return None
        frames: dict[int, list[str]] = {}
        for group in (group for group in groups if group.first.frames):
            for source in group.sources:
                if source.startswith("rank "):
                    frames.setdefault(int(source.removeprefix("rank ")), group.first.frames)
        return describe_stacks([make_waiting(rank, stack) for rank, stack in frames.items()])

    def _is_about_fsdp(self, cause: Group) -> bool:
        under_fsdp = self._collect_evidence(cause).shows("fsdp")
        if any(match.grade != "possible" or under_fsdp for match in cause.matches):
            return True
        return _names_fsdp(cause.first.text, cause.first.frames, under_fsdp=under_fsdp)

    def _match_hang(self, hang: Hang) -> list[Match]:
        """Returns the entries that the hang may be.

        An entry is known for certain only if some ranks gather a model while others wait elsewhere, or while others
        gather the model and send it to an engine.
        """
        stacks = ["\n".join(reversed(waiting.frames)) for waiting in hang.waiting]
        is_apart = hang.differs and len({(_gathers(stack), _SENDING.search(stack) is None) for stack in stacks}) > 1
        for operation in sorted({waiting.collective or waiting.op for waiting in hang.waiting}):
            evidence = Evidence(
                message=f"Watchdog caught collective operation timeout: WorkNCCL(OpType={operation})",
                traceback="\n".join(stacks),
                indirect=not is_apart,
                log=self._clues.shown,
                torch=self._clues.torch,
            )
            if matches := match_evidence(evidence):
                return [replace(match, open=tuple(map(_ask_of_hang, match.open))) for match in matches]
        return []


def _ask_of_hang(question: str) -> str:
    """Returns the question of an entry, or a question about other ranks in place of ``ASK_FOR_PLACE``."""
    return "is another rank in another call, or has it ended?" if question == ASK_FOR_PLACE else question


def _is_sure(matches: Sequence[Match]) -> bool:
    return any(match.grade != "possible" for match in matches)


def _is_timeout(group: Group) -> bool:
    return group.consequence == _TIMED_OUT


def _choose_group(groups: Sequence[Group], raised: Raised) -> Group | None:
    """Returns the group of an exception among the groups of its message; None if the exception needs a new group.

    An exception without frames may belong to any group. It joins a group of its rank if there is one, otherwise the
    first group. An exception that was raised while the same message was handled, or because of it, is the same failure.
    """
    if not groups:
        return None
    place = find_raising_place(raised.frames)
    of_source = [group for group in groups if raised.source in group.sources]
    is_again = raised.chained or any(group.first.swallowed for group in of_source)
    if place is None or is_again or len(groups) >= _MAX_PLACES:
        return next(iter([*of_source, *groups]), None)
    return next((group for group in groups if not group.frames or is_same_place(place, group.place)), None)


def _names_fsdp(message: str, frames: Sequence[str], *, under_fsdp: bool) -> bool:
    """Returns whether the message or the innermost frames name FSDP, a DTensor or a sharded checkpoint.

    under_fsdp: whether the job uses FSDP. In such a job, frames of a state dict or a gather count as well.
    """
    if _is_raised_anywhere(message):
        return False
    # Every call of a module under FSDP1 goes through its forward.
    telling = [*(frame for frame in frames[:-1] if not frame.endswith(_CALLS)), *frames[-1:]]
    is_named = any(_FSDP.search(text) for text in (message, *telling[-_INNERMOST:]))
    return is_named or (under_fsdp and any(map(_gathers, frames)))


def _is_raised_anywhere(message: str) -> bool:
    """Returns whether the failure can be raised at any place, so that the traceback does not show its cause."""
    return _ANYWHERE.search(message) is not None


def _gathers(frames: str) -> bool:
    """Returns whether a traceback goes through a state dict or a gather of a model."""
    return _GATHERING.search(frames) is not None


def _find_first_kind(kinds: Mapping[str, Sequence[re.Pattern[str]]], message: str) -> str:
    return next((name for name, patterns in kinds.items() if any(p.search(message) for p in patterns)), "")


def _find_foreign_cause(raised: Raised) -> str:
    """Names a cause other than FSDP; empty if there is none.

    The message, the package that raised the exception, or a mistake in the user's own line shows such a cause.
    """
    if named := _find_first_kind(_FOREIGN, raised.text):
        # Which device torch's own FSDP asks for is FSDP's matter.
        is_of_device = named == "a torch that does not fit the machine"
        return "" if is_of_device and any(_FSDP_FRAME.search(frame) for frame in raised.frames) else named
    if placed := _find_first_kind(_FOREIGN_PLACES, "\n".join(raised.frames[-_INNERMOST:])):
        return placed
    is_own = raised.type in _MISTAKES or raised.script
    is_of_tensors = _OF_TENSORS.search(f"{raised.text} {raised.asserted}")
    if not is_own or not raised.frames or is_of_tensors:
        return ""
    package = find_package(raised.frames[-1])
    return f"the code of {package}" if package not in ("", "python", "torch") else "the job's own code"


def _decide_showing(cause: Group | None, hang: Hang | None) -> Showing:
    if cause is not None and not cause.consequence and not cause.first.cut:
        return "failure"
    if hang is not None:
        return "hang"
    if cause is None:
        return "nothing"
    return "consequences" if cause.consequence else "cut"


def _count_consequences(groups: list[Group], cause: Group | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        if group.consequence and group is not cause:
            counts[group.consequence] = counts.get(group.consequence, 0) + group.count
    return counts


@functools.lru_cache(maxsize=4096)
def _make_group_key(line: str) -> str:
    """Returns a message's first line without the parts that differ between ranks and attempts.

    line: the line with each digit replaced by 0.
    """
    return _DIGITS.sub("#", fold(signatures.join_lines(line)))


def _is_earlier(raised: Raised, other: Raised) -> bool:
    """Returns whether ``raised`` comes before ``other``: by line within one file, otherwise by time.

    Exceptions arrive in the order in which their tracebacks end, which may be another order.
    """
    if raised.file == other.file:
        return raised.line < other.line
    return raised.time is not None and other.time is not None and raised.time < other.time


def _sort_groups(groups: list[Group]) -> list[Group]:
    """Sorts groups by time if every group has a time; otherwise in the order of the files and of their lines."""
    files = {name: index for index, name in enumerate(dict.fromkeys(group.first.file for group in groups))}
    all_timed = all(group.first.time is not None for group in groups)

    def make_key(group: Group) -> tuple[float, int, int]:
        first = group.first
        return (first.time or 0.0) if all_timed else 0.0, files[first.file], first.line

    return sorted(groups, key=make_key)
