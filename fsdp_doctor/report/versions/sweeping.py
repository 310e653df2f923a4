"""Runs the probe with each version of torch and of other packages, each in a new environment.

Keeps and continues the reports.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

import fsdp_doctor
from fsdp_doctor import __version__
from fsdp_doctor.errors import CannotRun, DoctorFault, Interrupted, UsageError
from fsdp_doctor.machine.environment import collect_without_torch, write_home_as_tilde
from fsdp_doctor.machine.versions import is_at_least
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report, write_report

# A copy of the value in fsdp_doctor/emulated/build.py, which imports torch.
OLDEST_EMULATED_TORCH = "2.10"
_PACKAGE = pathlib.Path(fsdp_doctor.__file__).parent
_LONGEST_REASON = 300
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Options of the probe that the sweep sets itself, or that only choose the output.
_OVERRIDDEN = ("--json", "--device", "--format")


@dataclass(frozen=True, kw_only=True)
class Packages:
    """Packages that are installed for one probe.

    torch: a version; ``2.10`` means its newest patch release.
    beside: requirements for the packages to install in addition to torch.
    """

    torch: str
    beside: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"torch {self.torch}", *self.beside))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep over versions of torch and of other packages.

    versions: versions of torch, as the user gave them.
    requirements: further packages; several requirements of the same package are tried one after the other.
    options: the probe's options.
    directory: the directory for the reports.
    """

    versions: tuple[str, ...]
    requirements: tuple[str, ...]
    options: tuple[str, ...]
    directory: pathlib.Path

    def list_packages(self) -> list[Packages]:
        """Lists every version of torch with every choice of the other packages."""
        choices: dict[str, list[str]] = {}
        for text in self.requirements:
            choices.setdefault(_name_package(text), []).append(text)
        return [
            Packages(torch=version, beside=beside)
            for version in self.versions
            for beside in itertools.product(*choices.values())
        ]

    def name_file(self, packages: Packages) -> pathlib.Path:
        """Returns the file for the report of these packages. The file's name contains all packages."""
        beside = (re.sub(r"[^\w.]+", "", text.replace("==", "")) for text in packages.beside)
        return self.directory / f"{'-'.join([f'torch{packages.torch}', *beside])}.json"


def _name_package(requirement: str) -> str:
    """Returns the package of a requirement, or the text itself if it is a path or the like."""
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return requirement


@dataclass(frozen=True, kw_only=True)
class Swept:
    """The finished or failed probe of one set of packages.

    trouble: the reason why the probe's report is incomplete; empty if the report is complete.
    exit_code: the exit code for this reason.
    """

    packages: Packages
    file: pathlib.Path
    report: Report
    trouble: str = ""
    exit_code: int = CannotRun.exit_code


def check(sweep: Sweep) -> None:
    """Checks the sweep before it begins.

    Raises UsageError if it would replace a report that was made with other options, or if uv is not installed.
    """
    find_uv()
    for packages in sweep.list_packages():
        earlier = _read_existing_report(sweep.name_file(packages))
        if earlier is not None and earlier.results and not _has_options(earlier, sweep.options):
            raise UsageError(
                f"{sweep.name_file(packages)} is the report of `{earlier.command}`, whose options differ from "
                "those of this sweep; give another --directory, or remove the report"
            )


def run(sweep: Sweep) -> Iterator[Swept]:
    """Probes the packages one after the other. Each environment is removed before the next environment is made."""
    for packages in sweep.list_packages():
        file = sweep.name_file(packages)
        report, trouble = _read_existing_report(file), None
        if report is None or not report.complete:
            trouble = _run_packages(sweep, packages)
            report = _read_existing_report(file)
        if report is None or not (report.results or report.complete):
            report = _make_empty_report(sweep, packages, str(trouble or ""))
            write_report(file, report)
        if report.complete and not isinstance(trouble, DoctorFault):
            yield Swept(packages=packages, file=file, report=report)
        else:
            why = trouble or DoctorFault(report.ended or "it ended before all cases had run")
            yield Swept(packages=packages, file=file, report=report, trouble=str(why), exit_code=why.exit_code)


def _run_packages(sweep: Sweep, packages: Packages) -> CannotRun | DoctorFault | None:
    """Installs and probes the packages. Returns the reason if there is no complete report, else None.

    Raises DoctorFault if no environment can be made in the sweep's directory.
    """
    file = sweep.name_file(packages)
    log = file.with_suffix(".log")
    try:
        with tempfile.TemporaryDirectory(prefix=".environment-", dir=sweep.directory) as scratch:
            log.write_text("")
            _print_progress(f"{packages}: installing")
            # A version such as 2.10 means its newest patch release.
            torch = f"torch=={packages.torch}{'' if packages.torch.count('.') > 1 else '.*'}"
            try:
                python = make_environment(pathlib.Path(scratch, "environment"), [torch, *packages.beside], log)
            except CannotRun as reason:
                return CannotRun(f"{packages} does not install: {reason}")
            # All probes run a copy of the doctor, so that changes to its sources during the sweep have no effect. The
            # copy also hides the other packages of the environment in which the doctor is installed.
            doctor = pathlib.Path(scratch, "doctor")
            shutil.copytree(_PACKAGE, doctor / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            program = Program(python, doctor)
            _print_progress(f"{packages}: running")
            options = [*sweep.options, *_choose_device_options(sweep.options, program)]
            return program.probe([*options, "--json", str(file), "--resume"], log)
    except OSError as error:
        raise DoctorFault(f"cannot make an environment in {sweep.directory}: {error.strerror or error}") from None


def _print_progress(text: str) -> None:
    sys.stderr.write(f"fsdp-doctor: {text}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Program:
    """An installation of fsdp-doctor in a separate environment.

    path: the directory that contains its package.
    """

    python: pathlib.Path
    path: pathlib.Path

    def probe(self, options: Sequence[str], log: pathlib.Path) -> CannotRun | DoctorFault | None:
        """Runs ``fsdp-doctor probe``. Returns the reason if the probe made no complete report, else None.

        An unexpected verdict counts as a result. Raises UsageError for options that the probe refuses, and Interrupted
        if a signal ended the probe; in both cases the next probes would end in the same way.
        """
        command = [str(self.python), "-m", "fsdp_doctor", "probe", *options, "--format", "lines"]
        with (
            open(log, "a", encoding="utf-8") as file,
            # If this process has to end, it terminates the probe, which writes its partial report first.
            _run_child(command, subprocess.Popen.terminate, stdout=file, stderr=file, env=self._variables) as process,
        ):
            code = process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        sentences = [line.removeprefix("fsdp-doctor: ") for line in lines if line.startswith("fsdp-doctor: ")]
        sentence = sentences[-1] if sentences else (lines or [""])[-1]
        match code:
            case 0 | 1:
                return None
            case UsageError.exit_code:
                raise UsageError(sentence)
            case CannotRun.exit_code:
                return CannotRun(sentence)
            case Interrupted.exit_code:
                raise Interrupted(sentence)
            case _:
                return DoctorFault(f"the probe ended with exit code {code}: {sentence}")

    def list_accelerators(self) -> list[str]:
        """Returns the names of the accelerators that the environment's torch finds."""
        try:
            names: list[str] = json.loads(self._read_output("-m", "fsdp_doctor", "env", "--json"))["accelerators"]
        except (ValueError, KeyError):
            return []
        return names

    def read_torch_version(self) -> str:
        """Reads the installed version of torch."""
        return self._read_output("-c", "import importlib.metadata as m; print(m.version('torch'))").strip()

    def _read_output(self, *arguments: str) -> str:
        return subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, env=self._variables
        ).stdout

    @property
    def _variables(self) -> dict[str, str]:
        return _make_child_environment(PYTHONPATH=str(self.path))


def _choose_device_options(options: Sequence[str], program: Program) -> list[str]:
    """Returns ``--device cpu`` if torch is too old for the emulated device and finds no accelerator; else nothing."""
    if "--device" in _split_words(options):
        return []
    if is_at_least(program.read_torch_version(), OLDEST_EMULATED_TORCH) or program.list_accelerators():
        return []
    return ["--device", "cpu"]


# Existing reports


def _read_existing_report(file: pathlib.Path) -> Report | None:
    return read_report(file) if file.exists() else None


def _has_options(report: Report, options: Sequence[str]) -> bool:
    """Returns whether a probe with these options would run the same cases on the same device."""
    same_device = _read_device(options) in ("auto", report.device)
    return same_device and _list_selecting_words(shlex.split(report.command)[2:]) == _list_selecting_words(options)


def _read_device(options: Sequence[str]) -> str:
    pairs = itertools.pairwise(_split_words(options))
    return next((value for name, value in pairs if name == "--device"), "auto")


def _list_selecting_words(options: Sequence[str]) -> list[str]:
    """Lists the words of the options that decide which cases run, without the device and the outputs."""
    words = iter(write_home_as_tilde(word) for word in _split_words(options))
    selecting = []
    for word in words:
        if word in _OVERRIDDEN:
            next(words, None)
        elif word != "--resume":
            selecting.append(word)
    return selecting


def _split_words(options: Sequence[str]) -> list[str]:
    """Splits options into words: ``--device=cpu`` becomes two words."""
    words = []
    for option in options:
        name, equals, value = option.partition("=")
        words += [name, value] if equals and name in _OVERRIDDEN else [option]
    return words


def _make_empty_report(sweep: Sweep, packages: Packages, trouble: str) -> Report:
    """Makes a report without results for packages on which the probe could not run.

    A merged report then states the reason, which is ``trouble``.
    """
    facts = collect_without_torch()
    facts["packages"] = {"torch": packages.torch, **read_exact_versions(packages.beside)}
    return Report(
        version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["fsdp-doctor", "probe", *map(write_home_as_tilde, sweep.options)]),
        device=_read_device(sweep.options),
        world_size=0,
        num_selected=0,
        environment=facts,
        ended=trouble,
    )


def read_exact_versions(requirements: Sequence[str]) -> dict[str, str]:
    """Maps packages to the versions in requirements such as ``transformers==5.23.0``. Ignores other requirements."""
    versions: dict[str, str] = {}
    for text in requirements:
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(text)
            exact = [each.version for each in requirement.specifier if each.operator == "=="]
            if exact:
                versions[requirement.name] = exact[0]
    return versions


# Environments


def make_environment(directory: pathlib.Path, requirements: Sequence[str], log: pathlib.Path) -> pathlib.Path:
    """Makes an environment with the given and fsdp-doctor's requirements. Returns the environment's interpreter.

    Raises CannotRun with uv's reason if the packages cannot be installed, and UsageError if uv is not installed.
    """
    uv, python = find_uv(), directory / "bin" / "python"
    with open(log, "a", encoding="utf-8") as file:
        _run_uv([uv, "venv", "--quiet", "--python", sys.executable, str(directory)], file)
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        _run_uv([*install, *requirements, *read_package_requirements()], file)
    return python


def find_uv() -> str:
    """Finds the program ``uv`` in this interpreter's directory or on PATH. Raises UsageError if it is missing."""
    scripts = sysconfig.get_path("scripts")
    uv = shutil.which("uv", path=os.pathsep.join((scripts, os.environ.get("PATH", os.defpath))))
    if uv is None:
        raise UsageError(
            "a sweep makes its environments with uv, but uv is not installed: pip install 'fsdp-doctor[sweep]'"
        )
    return uv


def read_package_requirements() -> list[str]:
    """Reads the requirements of this package: in a checkout from pyproject.toml, otherwise from the metadata."""
    project = _PACKAGE.parent / "pyproject.toml"
    if project.is_file():
        declared = msgspec.toml.decode(project.read_bytes())["project"]["dependencies"]
    else:
        declared = importlib.metadata.requires("fsdp-doctor") or []
    parsed = [Requirement(text) for text in declared]
    needed = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{each.name}{each.specifier}" for each in needed]


def _run_uv(command: list[str], log: IO[str]) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        with _run_child(command, _kill_group, env=_make_child_environment(), **streams) as installer:
            output, _ = installer.communicate()
    except OSError as error:
        raise CannotRun(f"{command[0]} cannot be started: {error.strerror or error}") from None
    log.write(output)
    if installer.returncode:
        raise CannotRun(find_reason(output) or f"{command[0]} ended with exit code {installer.returncode}")


def find_reason(output: str) -> str:
    """Joins the output of uv into one line, without its drawing characters."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", output).split())[:_LONGEST_REASON]


def _make_child_environment(**more: str) -> dict[str, str]:
    """Returns the environment variables of this process, without those that point Python to other packages."""
    left_out = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in left_out} | more


@contextlib.contextmanager
def _run_child(
    command: Sequence[str], end: Callable[[subprocess.Popen[Any]], None], **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Runs a command in a new session, so that signals from the terminal reach only this process.

    A signal during the start takes effect after the start, so that no child outlives this process. Raises OSError as
    Popen does.

    end: a function that is called if the block raises an exception; afterwards the process is waited for.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    restore = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=restore, **options)
        try:
            restore()
            yield process
        except BaseException:
            end(process)
            process.wait()
            raise
    finally:
        restore()


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process and all processes that it started, which would otherwise continue to run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
