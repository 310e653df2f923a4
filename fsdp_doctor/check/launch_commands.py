"""Reads launch commands in shell scripts as settings: the launcher, its flags, the script, and the script's flags.

``torchrun --nproc_per_node 8 train.py --fsdp full_shard`` becomes ``launch.program=torchrun``,
``launch.nproc_per_node=8``, ``launch.script=train.py`` and ``fsdp=full_shard``. Dashes in a flag become underscores.
Variables and arrays that the script assigns are expanded, and so is the default in ``${NAME:-default}``. Nothing is
executed: a variable that is never assigned, or is assigned different values, stays as written and counts as unknown.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.check.config_files import parse_scalar
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.errors import UsageError

SECTION = "launch"
ENVIRONMENT = "env"
PROGRAM = f"{SECTION}.program"
SCRIPT = f"{SECTION}.script"
# Lines of other commands that look just as much like the training command as the one that was read.
NOT_READ = f"{SECTION}.not_read"

# Words that start a launcher, and the launcher's name in the settings.
_LAUNCHERS: dict[tuple[str, ...], str] = {
    ("torchrun",): "torchrun",
    ("-m", "torch.distributed.run"): "torchrun",
    ("-m", "torch.distributed.launch"): "torchrun",
    ("accelerate", "launch"): "accelerate",
    ("-m", "accelerate.commands.launch"): "accelerate",
    ("deepspeed",): "deepspeed",
}
# Programs that start the training processes themselves. Their first argument is a subcommand.
_PROGRAMS = ("swift", "megatron", "axolotl", "llamafactory-cli", "trl")
_NAMES = ("python", "torchrun", "accelerate", "deepspeed", *_PROGRAMS)
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_SWITCHES = frozenset(
    (
        *("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu", "tpu", "cpu", "quiet", "same_network", "debug"),
        *("standalone", "no_python", "use_env", "no_local_rank"),
    )
)
_RANKS_OF_A_NODE = (
    *(f"{SECTION}.{name}" for name in ("nproc_per_node", "num_gpus", "gpus_per_node")),
    f"{ENVIRONMENT}.NPROC_PER_NODE",
)
_NODES = (f"{SECTION}.nnodes", f"{SECTION}.num_nodes", f"{ENVIRONMENT}.NNODES")
_MAX_COMMAND = 100_000
_MAX_COMMANDS = 200
_MAX_VALUE = 20_000
_MAX_EXPANDED = 4 << 20

_QUOTED = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
_ASSIGNED_WORD = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]{0,199})(?:=(.*))?", re.DOTALL)
_OVERRIDE_WORD = re.compile(r"[~+]{0,2}[\w@/.]{1,200}=")
_CONFIG_FILE = re.compile(r"[^=]+\.(?:ya?ml|json|toml)")
_REDIRECTION = re.compile(r"(?<=\s)(?:\d?>>?&?|&>>?)[ \t]*[^\s'\";|&<>]+")
_END = re.compile(r"[;|&]+|`+")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# In a shell, a space after the backslash would end the line, but copied scripts often contain one.
_CONTINUED = re.compile(r"\\[ \t]*$")

# The bound on repetitions limits the memory of the regular expression.
_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|\$\{[^}\n]{0,500}\}|\$(?!\{)|[^\s'\"`$]){0,20000}"
_OVERRIDE = re.compile(
    r"(?<![\w.$/=:-])(?:--)?(?P<quote>['\"])?(?:\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})="
    rf"(?P<value>(?(quote)(?:(?!(?P=quote))[^\n]){{0,20000}}|{_VALUE}))"
)
_DELETION = re.compile(r"(?<!\S)['\"]?~(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})")
_ARRAY = re.compile(r"^[ \t]*(?P<name>[A-Za-z_]\w*)=\((?P<value>[^()]{0,20000})\)[ \t]*$", re.MULTILINE)
# `: "${NAME:=value}"` assigns a value if the variable has none.
_DEFAULTED = re.compile(
    r"^[ \t]*:[ \t]+\"?\$\{(?P<name>[A-Za-z_]\w*):?=(?P<value>[^{}\n]*)\}\"?[ \t]*(?:#.*)?$", re.MULTILINE
)
_ASSIGNMENT = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?!\()(?P<value>{_VALUE})[ \t]*(?:[#;].*)?$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?:\[@\])?(?::?[-=](?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_QUOTED_ARRAY = re.compile(r"\"(\$\{\w+\[@\]\})\"")


def read_script(text: str, name: str) -> Iterator[Setting]:
    """Reads the settings of a script's launch command, followed by its overrides ``a.b=value``.

    Of several commands, a command that names FSDP is preferred, then a command with a launcher, then the last command.
    Raises UsageError if variables expand to too much text.
    """
    script = _Script(_COMMENT.sub("", text), name)
    commands = _read_commands(script)
    best = max((command.priority for command in commands), default=None)
    *others, chosen = [command for command in commands if command.priority == best] or [_Command(0, "")]
    differing = [str(command.line) for command in others if command.deciding != chosen.deciding]
    if differing and chosen.names_fsdp:
        chosen.rows.append(Setting(NOT_READ, f"line {', '.join(differing)}", script.name))
    return itertools.chain(chosen.rows, script.list_overrides())


def count_launched_ranks(settings: Settings) -> int | None:
    """Counts the ranks that the command starts; None if the command does not give the number.

    Raises Unreadable for a number that cannot be read.
    """
    if processes := settings.read_number(f"{SECTION}.num_processes"):
        return processes
    per_node, nodes = settings.read_text(*_RANKS_OF_A_NODE), settings.read_text(*_NODES)
    if per_node in ("", "cpu") or "$" in per_node or ":" in nodes or "$" in nodes:
        return None
    if per_node in ("gpu", "auto"):
        devices = settings.read_text(f"{ENVIRONMENT}.CUDA_VISIBLE_DEVICES")
        ranks: int | None = 0 if "$" in devices else sum(bool(name.strip()) for name in devices.split(","))
    else:
        ranks = settings.read_number(*_RANKS_OF_A_NODE)
    return ranks * (settings.read_number(*_NODES) or 1) if ranks else None


@dataclass
class _Script:
    """Shell script without comments; ``name`` is its file name.

    ``variables`` maps each variable that the script assigns to its last value. ``unknown`` names the variables that get
    different values, for example in two branches.
    """

    text: str
    name: str
    variables: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    _expanded: int = 0

    def __post_init__(self) -> None:
        values: dict[str, set[str]] = {}
        matches = (match for pattern in (_ARRAY, _DEFAULTED, _ASSIGNMENT) for match in pattern.finditer(self.text))
        # As in a shell, a variable has its value from the line of the assignment on.
        for match in sorted(matches, key=lambda match: match.start()):
            written = match["value"] if match.re is _ARRAY else _unquote(match["value"])
            value = self.expand(written.replace("\n", " "))
            values.setdefault(match["name"], set()).add(value)
            self.variables[match["name"]] = value
        self.unknown = {name for name, different in values.items() if len(different) > 1}

    def expand(self, text: str) -> str:
        """Expands known variables in ``text``; unknown variables stay as written."""

        def find_value(match: re.Match[str]) -> str:
            name = match["braced"] or match["bare"]
            default = match[0] if match["default"] is None else match["default"]
            # The default also replaces an empty variable.
            known = self.variables.get(name, default) or match["default"] or ""
            value = match[0] if name in self.unknown else known
            self._expanded += len(value)
            if self._expanded > _MAX_EXPANDED:
                raise self._refuse_too_long()
            return value

        expanded = _VARIABLE.sub(find_value, _QUOTED_ARRAY.sub(r"\1", text))
        if len(expanded) > max(_MAX_VALUE, len(text)):
            raise self._refuse_too_long()
        return expanded

    def list_overrides(self) -> Iterator[Setting]:
        """Lists each ``a.b=value`` of the script that no ``~a.b`` removes, in the script's order."""
        deleted = {match["key"] for match in _DELETION.finditer(self.text)}
        line, seen = 1, 0
        for match in _OVERRIDE.finditer(self.text):
            value = match["value"] if match["quote"] else _unquote(match["value"].rstrip("\\,;.)"))
            line, seen = line + self.text.count("\n", seen, match.start()), match.start()
            if match["key"] not in deleted:
                yield Setting(match["key"], parse_scalar(self.expand(value)), f"{self.name}:{line}")

    def iterate_lines(self) -> Iterator[tuple[int, str]]:
        """Yields each line with its number. Lines joined by a backslash count as one."""
        parts: list[str] = []
        for number, line in enumerate(self.text.split("\n"), 1):
            if _CONTINUED.search(line[-100:]):
                parts.append(line.rstrip()[:-1])
                continue
            yield number - len(parts), "".join([*parts, line])
            parts = []
        if parts:
            yield self.text.count("\n") + 2 - len(parts), "".join(parts)

    def _refuse_too_long(self) -> UsageError:
        return UsageError(f"{self.name}: its variables contain one another and become too long")


@dataclass
class _Command:
    """One launch command and its settings."""

    line: int
    where: str
    program: str = ""
    rows: list[Setting] = field(default_factory=list)

    def add(self, key: str, value: object) -> None:
        self.rows.append(Setting(key, value, self.where))

    @property
    def names_fsdp(self) -> bool:
        return any("fsdp" in row.key.lower() for row in self.rows)

    @property
    def priority(self) -> tuple[bool, bool]:
        return self.names_fsdp, self.program != "python"

    @property
    def deciding(self) -> dict[str, str]:
        """Settings about FSDP or the number of ranks."""
        return {row.key: str(row.value) for row in self.rows if "fsdp" in row.key or row.key.startswith(f"{SECTION}.n")}


def _read_commands(script: _Script) -> list[_Command]:
    commands: list[_Command] = []
    for line, text in script.iterate_lines():
        if len(commands) == _MAX_COMMANDS:
            break
        if len(text) > _MAX_COMMAND or not any(name in (expanded := script.expand(text)) for name in _NAMES):
            continue
        words = _split_words(expanded)
        while words and len(commands) < _MAX_COMMANDS:
            end = next((at for at, word in enumerate(words) if _END.fullmatch(word)), len(words))
            if command := _read_command(words[:end], f"{script.name}:{line}", line):
                commands.append(command)
            words = words[end + 1 :]
    return commands


def _split_words(line: str) -> list[str]:
    """Splits a line like a shell, drops output redirections, and makes ``;``, ``|`` and ``&`` separate words."""
    lexer = shlex.shlex(_REDIRECTION.sub(" ", line), posix=True, punctuation_chars=";|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        # A quotation continues on the next line, or there is an unmatched apostrophe.
        return re.findall(r"[;|&]+|[^\s;|&]+", re.sub(r"['\"\\]", "", line))


def _read_command(words: Sequence[str], where: str, line: int) -> _Command | None:
    """Reads a command; None if it cannot be a training launch."""
    command = _Command(line, where)
    at = 0
    # `VARIABLE=value`, `env`, `nohup`, `srun --x`, `uv run` and similar words may precede the launcher.
    while at < len(words) and not command.program:
        if assigned := _ASSIGNED_WORD.fullmatch(words[at]):
            command.add(f"{ENVIRONMENT}.{assigned[1]}", assigned[2])
        length, command.program = _match_launcher(words, at)
        at += length
    if not command.program:
        return None
    command.add(PROGRAM, command.program)
    if command.program not in ("python", *_PROGRAMS):
        at = _read_launcher_flags(words, at, command)
    rest = list(words[at:])
    while rest[:1] in (["-m"], ["--module"], ["-u"]):
        rest.pop(0)
    if rest and not rest[0].startswith("-"):
        command.add(SCRIPT, rest.pop(0))
    _read_script_flags(rest, command)
    return command


def _match_launcher(words: Sequence[str], at: int) -> tuple[int, str]:
    """Returns how many words the launcher at this position takes, and its name; (1, "") if there is no launcher."""
    word = words[at].strip("$`(")
    if _PYTHON.fullmatch(word):
        name = _LAUNCHERS.get(tuple(words[at + 1 : at + 3]))
        return (3, name) if name else (1, "python")
    base = word.rpartition("/")[2]
    for names, program in _LAUNCHERS.items():
        if (base, *words[at + 1 : at + len(names)]) == names:
            return len(names), program
    has_subcommand = at + 1 < len(words) and not words[at + 1].startswith("-")
    return 1, base if base in _PROGRAMS and has_subcommand else ""


def _read_launcher_flags(words: Sequence[str], at: int, command: _Command) -> int:
    """Reads the flags before the script, and returns the script's position."""
    while at < len(words):
        match = _FLAG.fullmatch(words[at])
        if match is not None and match[1] in ("m", "module") and at + 1 < len(words) and words[at + 1][:1] == "-":
            at += 1  # `-m` may also precede other flags.
            continue
        if match is None or match[1] in ("m", "module"):
            return at
        name, value = match[1].replace("-", "_"), match[2]
        at += 1
        following = words[at] if at < len(words) else ""
        is_script = following == "-m" or following.endswith(".py")
        if value is None and name not in _SWITCHES and following and not is_script and not _FLAG.fullmatch(following):
            value = following
            at += 1
        # The value stays text, since YAML would read 1:2 as a base-60 number.
        command.add(f"{SECTION}.{name}", True if value is None else value)
    return at


def _read_script_flags(words: Sequence[str], command: _Command) -> None:
    """Reads ``--flag value...``, ``--flag=value``, ``--flag``, ``key=value``, and names of configuration files."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        match = _FLAG.fullmatch(word)
        if match is None:
            if _CONFIG_FILE.fullmatch(word):
                command.add(f"{SECTION}.config", word)
            elif assigned := _ASSIGNED_WORD.fullmatch(word.lstrip("+")):
                command.add(assigned[1], parse_scalar(assigned[2]))
            continue
        values = [] if match[2] is None else [match[2]]
        while match[2] is None and at < len(words):
            if _FLAG.fullmatch(words[at]) or _OVERRIDE_WORD.match(words[at]):
                break
            values.append(words[at])
            at += 1
        key = match[1].replace("-", "_")
        if not key.startswith((f"{SECTION}.", f"{ENVIRONMENT}.")):
            command.add(key, parse_scalar(" ".join(values)) if values else True)


def _unquote(text: str) -> str:
    return _QUOTED.sub(lambda match: match[1] if match[1] is not None else match[2], text)
