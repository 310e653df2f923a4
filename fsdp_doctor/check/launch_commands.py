"""Commands that start a training, in a text: the launcher, what it starts, and the flags of both, as settings.

``torchrun --nproc_per_node 8 train.py --fsdp full_shard`` becomes ``launch.program=torchrun``,
``launch.nproc_per_node=8``, ``launch.script=train.py`` and ``fsdp=full_shard``. Dashes in a flag become underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.shell_text import ShellText
from fsdp_doctor.check.yaml_text import scalar

SECTION = "launch"
ENVIRONMENT = "env"
# The lines of other commands that look as much like the training as the one that is read.
NOT_READ = f"{SECTION}.not_read"
# The words that a launcher is called by, and its name among settings.
_LAUNCHERS: dict[tuple[str, ...], str] = {
    ("torchrun",): "torchrun",
    ("-m", "torch.distributed.run"): "torchrun",
    ("-m", "torch.distributed.launch"): "torchrun",
    ("accelerate", "launch"): "accelerate",
    ("-m", "accelerate.commands.launch"): "accelerate",
    ("deepspeed",): "deepspeed",
    ("tune", "run"): "tune",
}
# Programs that start the processes themselves; their first word is what they are to do.
_PROGRAMS = ("swift", "megatron", "axolotl", "llamafactory-cli", "trl")
_NAMES = ("python", "torchrun", "accelerate", "deepspeed", "tune run", *_PROGRAMS)
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_SCRIPT = re.compile(r".+\.py")
_SWITCHES = frozenset(
    (
        *("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu", "tpu", "cpu", "quiet", "same_network", "debug"),
        *("standalone", "no_python", "use_env", "no_local_rank"),
    )
)
_TOKEN = re.compile(r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\;|&]|(?<=[<>])&)+|[;|&]+")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]{0,199})(?:=(.*))?", re.DOTALL)
_OVERRIDE_WORD = re.compile(r"[~+]{0,2}[\w@/.]{1,200}=")
_END = re.compile(r"[;|&]+|`+")
_LONGEST_COMMAND = 100_000
_MOST_COMMANDS = 200


@dataclass
class LaunchCommand:
    """One command: ``rows`` are its settings."""

    line: int
    program: str = ""
    rows: list[Setting] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, bool]:
        """Which of several commands is the training: one that names FSDP, then one that has a launcher."""
        return self.names_fsdp, self.program not in ("", "python")

    @property
    def names_fsdp(self) -> bool:
        return any("fsdp" in row.key.lower() for row in self.rows)

    def differs_from(self, other: LaunchCommand) -> bool:
        """Whether it says something else of FSDP, or of the ranks."""
        return self._deciding() != other._deciding()

    def _deciding(self) -> dict[str, str]:
        return {row.key: str(row.value) for row in self.rows if "fsdp" in row.key or row.key.startswith(f"{SECTION}.n")}


def launch_settings(shell: ShellText) -> list[Setting]:
    """The settings of the command that starts the training: of several that look alike the last."""
    found = commands(shell)
    best = max((command.rank for command in found), default=None)
    chosen = [command for command in found if command.rank == best]
    if not chosen:
        return []
    *others, taken = chosen
    differing = [command.line for command in others if command.differs_from(taken)]
    if not differing or not taken.names_fsdp:
        return taken.rows
    return [*taken.rows, Setting(NOT_READ, f"line {', '.join(map(str, differing))}", shell.name)]


def commands(shell: ShellText) -> list[LaunchCommand]:
    found: list[LaunchCommand] = []
    for line, text in shell.lines():
        if len(text) > _LONGEST_COMMAND:
            continue
        written_out = shell.substituted(text)
        if not any(word in written_out for word in _NAMES):
            continue
        words = _words(written_out)
        while words and len(found) < _MOST_COMMANDS:
            end = next((at for at, word in enumerate(words) if _END.fullmatch(word)), len(words))
            if command := _command(words[:end], f"{shell.name}:{line}", line):
                found.append(command)
            words = words[end + 1 :]
    return found


def _words(text: str) -> list[str]:
    return [_plain(match[0]) for match in _TOKEN.finditer(text)]


def _plain(word: str) -> str:
    return re.sub(r"'([^']*)'|\"([^\"]*)\"|\\(.)", lambda match: match[1] or match[2] or match[3] or "", word)


def _command(words: Sequence[str], where: str, line: int) -> LaunchCommand | None:
    """None for one that starts nothing which could be a training."""
    command = LaunchCommand(line)
    at = 0
    # `VARIABLE=value` before it, and `env`, `nohup`, `srun --x`, `uv run` and the like.
    while at < len(words):
        if assigned := _ASSIGNED.fullmatch(words[at]):
            command.rows.append(Setting(f"{ENVIRONMENT}.{assigned[1]}", assigned[2], where))
        length, program = _launcher(words, at)
        if program:
            command.program = program
            at += length
            break
        at += 1
    if not command.program:
        return None
    command.rows.append(Setting(f"{SECTION}.program", command.program, where))
    if command.program not in ("python", *_PROGRAMS):
        at = _read_launcher_flags(words, at, command, where)
    _read_script(words, at, command, where)
    return command


def _launcher(words: Sequence[str], at: int) -> tuple[int, str]:
    """How many words the launcher at that place has, and its name; 0 where there is none."""
    word = words[at].strip("$`(")
    if _PYTHON.fullmatch(word):
        after = tuple(words[at + 1 : at + 3])
        name = _LAUNCHERS.get(after)
        return (3, name) if name else (1, "python")
    base = word.rpartition("/")[2]
    for names, program in _LAUNCHERS.items():
        if (base, *words[at + 1 : at + len(names)]) == names:
            return len(names), program
    return (1, base) if base in _PROGRAMS and at + 1 < len(words) and not words[at + 1].startswith("-") else (0, "")


def _read_launcher_flags(words: Sequence[str], at: int, command: LaunchCommand, where: str) -> int:
    """Reads up to what is launched; returns where that stands."""
    while at < len(words):
        match = _FLAG.fullmatch(words[at])
        if match is not None and match[1] in ("m", "module") and at + 1 < len(words) and words[at + 1][:1] == "-":
            at += 1  # `-m` may stand before other flags, too.
            continue
        if match is None or match[1] in ("m", "module"):
            return at
        name, value = match[1].replace("-", "_"), match[2]
        at += 1
        following = words[at] if at < len(words) else ""
        takes_value = value is None and name not in _SWITCHES and bool(following) and not _is_script(following)
        if takes_value and not _FLAG.fullmatch(following):
            value = following
            at += 1
        # As text: YAML takes 1:2 for a number of base 60.
        command.rows.append(Setting(f"{SECTION}.{name}", True if value is None else value, where))
    return at


def _is_script(word: str) -> bool:
    return bool(_SCRIPT.fullmatch(word)) or word == "-m"


def _read_script(words: Sequence[str], at: int, command: LaunchCommand, where: str) -> None:
    rest = list(words[at:])
    while rest[:1] in (["-m"], ["--module"], ["-u"]):
        rest = rest[1:]
    if rest and not rest[0].startswith("-"):
        command.rows.append(Setting(f"{SECTION}.script", rest.pop(0), where))
    command.rows += _flags(rest, where)


def _flags(words: Sequence[str], where: str) -> Iterator[Setting]:
    """``--flag value...``, ``--flag=value`` and ``--flag``; a word that is none's is the configuration's file."""
    at = 0
    while at < len(words):
        match = _FLAG.fullmatch(words[at])
        at += 1
        if match is None:
            assigned = _ASSIGNED.fullmatch(words[at - 1].lstrip("+"))
            if re.fullmatch(r"[^=]+\.(?:ya?ml|json|toml)", words[at - 1]):
                yield Setting(f"{SECTION}.config", words[at - 1], where)
            elif assigned:
                yield Setting(assigned[1], scalar(assigned[2]), where)
            continue
        values = [match[2]] if match[2] is not None else []
        while (
            match[2] is None
            and at < len(words)
            and not _FLAG.fullmatch(words[at])
            and not _OVERRIDE_WORD.match(words[at])
        ):
            values.append(words[at])
            at += 1
        key = match[1].replace("-", "_")
        if not key.startswith((f"{SECTION}.", f"{ENVIRONMENT}.")):
            yield Setting(key, scalar(" ".join(values)) if values else True, where)
