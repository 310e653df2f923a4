"""Information of the command line about itself: help, version, completion; and the defaults of a project."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import pytest
import typer
from program import run
from support.inside import doctor

import fsdp_doctor
from fsdp_doctor.cli.app import app
from fsdp_doctor.matrix.axes import AXES


def _commands(command: Any, *words: str) -> dict[tuple[str, ...], Any]:
    """Maps words to the program, its groups and their commands."""
    commands = {words: command}
    for name, inner in getattr(command, "commands", {}).items():
        commands |= _commands(inner, *words, name)
    return commands


_COMMANDS = _commands(typer.main.get_command(app))
_WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}


@pytest.mark.parametrize("words", _COMMANDS, ids=" ".join)
def test_the_help_prints_every_word_that_is_written_for_it(words: tuple[str, ...]) -> None:
    """Brackets and stars in a text are printed, not taken for markup. The short option for help is the long one."""
    done = doctor(*words, "-h", env=_WIDE)
    assert done.code == 0, done.stderr
    printed = " ".join(re.sub(r"[│`]", "", done.stdout).split())
    options = [parameter.help for parameter in _COMMANDS[words].params if getattr(parameter, "help", None)]
    assert [text for text in options if " ".join(text.replace("`", "").split()) not in printed] == []
    assert doctor(*words, "--help", env=_WIDE).stdout == done.stdout


@pytest.mark.parametrize("words", [words for words in _COMMANDS if len(words) == 1], ids=" ".join)
def test_no_help_shows_python_s_names_of_types(words: tuple[str, ...]) -> None:
    assert re.findall(r"<[\w ]+>|\w+\[\w+\]|\bPath\b|\{[A-Z]+\}", doctor(*words, "-h", env=_WIDE).stdout) == []


def test_the_commands_and_the_options_of_probe_are_listed_in_panels() -> None:
    panels = [re.findall(r"╭─ (.*?) ─", doctor(*words, "-h").stdout) for words in ((), ("probe",))]
    assert [len(of) > 3 for of in panels] == [True, True]


def test_the_version_has_a_short_option() -> None:
    assert doctor("-V").stdout == doctor("--version").stdout == f"fsdp-doctor {fsdp_doctor.__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["fsdp-doctor", "pro"], ["probe"]),
        *(
            (["fsdp-doctor", "probe", f"--{axis.name}", next(iter(axis.values))[0]], list(axis.values))
            for axis in AXES
            if axis.name != "model"
        ),
    ],
)
def test_a_shell_completes_commands_and_values_of_axes(line: list[str], words: list[str]) -> None:
    completion = {
        "_FSDP_DOCTOR_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
    }
    done = doctor(env=completion)
    assert done.code == 0, done.stderr
    assert done.stdout.split() == [word for word in words if word.startswith(line[-1])]


def _listed(tmp_path: pathlib.Path, settings: str, *arguments: str) -> set[str]:
    (tmp_path / "pyproject.toml").write_text(settings)
    below = tmp_path / "below"
    below.mkdir(exist_ok=True)
    done = doctor("list", *arguments, cwd=below)
    assert done.code == 0, done.stderr
    return {row["strategy"] for row in json.loads(done.stdout)}


def test_a_project_sets_defaults_of_options_and_the_command_line_overrides_them(tmp_path: pathlib.Path) -> None:
    settings = '[tool.fsdp-doctor.list]\nlevel = "quick"\nstrategy = "fsdp1"\njson = true\n'
    assert _listed(tmp_path, settings) == {"fsdp1"}
    assert _listed(tmp_path, settings, "--strategy", "fsdp2") == {"fsdp2"}
    several = settings.replace('"fsdp1"', '["fsdp1", "fsdp2"]')
    assert _listed(tmp_path, several) == {"fsdp1", "fsdp2"}


def test_a_project_default_uses_the_name_of_the_command_line_option(tmp_path: pathlib.Path) -> None:
    """``--json`` of ``probe`` is a file, and so not the parameter of this name."""
    (tmp_path / "pyproject.toml").write_text('[tool.fsdp-doctor.probe]\njson = "no/such/directory/report.json"\n')
    done = doctor("probe", "--device", "cpu", cwd=tmp_path)
    assert (done.code, "no/such/directory/report.json" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ("[tool.fsdp-doctor.list]\nlevl = 'quick'\n", "level"),
        ("[tool.fsdp-doctor.lst]\nlevel = 'quick'\n", "list"),
        ("[tool.fsdp-doctor]\nlist = 'quick'\n", "list"),
        ("[tool]\nfsdp-doctor = 3\n", "fsdp-doctor"),
        ("[tool.fsdp-doctor.list]\nlevel = \n", "pyproject.toml"),
        ("[tool.fsdp-doctor.probe]\nnproc = 'many'\n", "nproc"),
    ],
)
def test_an_invalid_project_setting_is_a_usage_error_that_names_the_setting(
    tmp_path: pathlib.Path, settings: str, word: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(settings)
    done = doctor("probe", "--device", "cpu", cwd=tmp_path)
    assert (done.code, word in done.stderr) == (2, True), done.stderr


def test_the_settings_of_other_tools_are_none_of_ours(tmp_path: pathlib.Path) -> None:
    assert _listed(tmp_path, "[tool.ruff]\nline-length = 120\n", "--json", "--strategy", "fsdp2") == {"fsdp2"}


@pytest.mark.parametrize("words", [words for words, command in _COMMANDS.items() if words], ids=" ".join)
def test_the_summary_of_a_command_is_the_first_sentence_of_its_help(words: tuple[str, ...]) -> None:
    listed = " ".join(re.sub(r"[│`]", "", doctor(*words[:-1], "--help", env=_WIDE).stdout).split())
    summary = (_COMMANDS[words].help or "").split("\n\n")[0]
    assert f" {words[-1]} {' '.join(summary.replace('`', '').split())}" in listed


def test_the_help_imports_no_command() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']; from fsdp_doctor.cli.app import app; app(standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith('fsdp_doctor.')), sep='\\n')"
    )
    done = run(sys.executable, "-c", code)
    imported = {line for line in done.stdout.splitlines() if line.startswith("fsdp_doctor.cli.")}
    assert imported == {f"fsdp_doctor.cli.{name}" for name in ("app", "commands", "output", "project_defaults")}
