"""Runs the probe in an environment of its own for each version of torch: one report each, kept and continued."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from packaging.requirements import InvalidRequirement, Requirement

import fsdp_doctor
from fsdp_doctor.errors import CannotRun

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
import datetime
import itertools
import json
import shlex
import tempfile
from dataclasses import dataclass

from fsdp_doctor import __version__
from fsdp_doctor.errors import DoctorFault, Interrupted, UsageError
from fsdp_doctor.machine.environment import home_as_tilde, without_torch
from fsdp_doctor.machine.versions import at_least
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report, write_report

_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], end: Callable[[subprocess.Popen[Any]], None], **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Runs a command in a session of its own, so that signals of the terminal reach this process alone.

    end: called if the block raises; then the process is waited for. While the process is being started, signals wait:
    otherwise it could be left running. Raises OSError as Popen does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
    as_before = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=as_before, **options)
        try:
            as_before()
            yield process
        except BaseException:
            end(process)
            process.wait()
            raise
    finally:
        as_before()


def kill_with_all_it_started(process: subprocess.Popen[Any]) -> None:
    """Kills a process with everything that it started, which would go on without it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_PACKAGE = pathlib.Path(fsdp_doctor.__file__).parent
_LONGEST_REASON = 300


def make_environment(directory: pathlib.Path, requirements: Sequence[str], log: IO[str]) -> pathlib.Path:
    """Makes an environment in ``directory`` with the requirements and the doctor's own; returns its interpreter.

    Raises CannotRun with the installer's reason where they do not install.
    """
    wanted = [*requirements, *own_requirements()]
    python = directory / "bin" / "python"
    uv = shutil.which("uv")
    if uv:
        _run_installer([uv, "venv", "--quiet", "--python", sys.executable, str(directory)], log)
        _run_installer([uv, "pip", "install", "--quiet", "--python", str(python), *wanted], log)
    else:
        _run_installer([sys.executable, "-m", "venv", str(directory)], log)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run_installer([*pip, *wanted], log)
    return python


def own_requirements() -> list[str]:
    """The requirements of this package: of its metadata, or of pyproject.toml in a checkout that is not installed."""
    try:
        declared = importlib.metadata.requires("fsdp-doctor") or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        declared = project["dependencies"]
    parsed = [Requirement(text) for text in declared]
    needed = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{each.name}{each.specifier}" for each in needed]


def exact_versions(requirements: Sequence[str]) -> dict[str, str]:
    """By package, the versions of requirements such as ``transformers==5.23.0``; others are left out."""
    versions: dict[str, str] = {}
    for text in requirements:
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(text)
            exact = [each.version for each in wanted.specifier if each.operator == "=="]
            if exact:
                versions[wanted.name] = exact[0]
    return versions


def copy_of_the_doctor(directory: pathlib.Path) -> pathlib.Path:
    """Copies the package that runs, however it was installed; returns what goes into PYTHONPATH.

    So every version runs the same doctor, also when its sources change meanwhile, and sees nothing else of the
    environment that it is installed in.
    """
    shutil.copytree(_PACKAGE, directory / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def variables_of_another_python(**more: str) -> dict[str, str]:
    """The environment variables of this process, without those that point Python to other packages."""
    ours = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours} | more


def _run_installer(command: list[str], log: IO[str]) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        with child_process(
            command, kill_with_all_it_started, env=variables_of_another_python(), **streams
        ) as installer:
            output, _ = installer.communicate()
    except OSError as error:
        raise CannotRun(f"{command[0]} cannot be started: {error.strerror or error}") from None
    log.write(output)
    if installer.returncode:
        raise CannotRun(reason_of(output) or f"{command[0]} ended with exit code {installer.returncode}")


def reason_of(output: str) -> str:
    """The reason of an installer on one line: pip's last error, or everything that uv printed, without its drawing."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    text = errors[-1] if errors else " ".join(lines)
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())[:_LONGEST_REASON]


# As fsdp_doctor/emulated/build.py has it, which imports torch.
OLDEST_EMULATED_TORCH = "2.10"
# Options of the probe that the sweep gives itself, or that say only where the result goes.
_GIVEN = ("--json", "--device", "--format")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep over versions of torch.

    versions: of torch, as they were asked for: ``2.10`` is its newest patch release.
    requirements: to install beside torch. options: of the probe. directory: where the reports are kept.
    """

    versions: tuple[str, ...]
    requirements: tuple[str, ...]
    options: tuple[str, ...]
    directory: pathlib.Path

    def file(self, version: str) -> pathlib.Path:
        """The report of a version; other packages than torch are in its name."""
        named = [f"torch{version}", *(re.sub(r"[^\w.]+", "", text.replace("==", "")) for text in self.requirements)]
        return self.directory / f"{'-'.join(named)}.json"


@dataclass(frozen=True, kw_only=True)
class Swept:
    """One version: its report, and why that is not complete; empty where it is. exit_code: 3, or 4 for a fault."""

    version: str
    file: pathlib.Path
    report: Report
    trouble: str = ""
    exit_code: int = CannotRun.exit_code


def check(sweep: Sweep) -> None:
    """Raises UsageError where a report is there of other options: it would be written over."""
    for version in sweep.versions:
        earlier = _earlier(sweep.file(version))
        if earlier is not None and earlier.results and not _same_request(sweep, earlier):
            raise UsageError(
                f"{sweep.file(version)} is the report of `{earlier.command}`, which has other options than this sweep; "
                "give another --directory, or remove it"
            )


def run(sweep: Sweep) -> Iterator[Swept]:
    """Runs each version, one after the other; its environment is removed before the next one is made."""
    for version in sweep.versions:
        file = sweep.file(version)
        earlier = _earlier(file)
        if earlier is not None and earlier.complete:
            yield Swept(version=version, file=file, report=earlier)
            continue
        trouble = _run_version(sweep, version)
        report = _earlier(file)
        if report is None or not (report.results or report.complete):
            report = _report_of_nothing(sweep, version, str(trouble or ""))
            write_report(file, report)
        if report.complete and not isinstance(trouble, DoctorFault):
            yield Swept(version=version, file=file, report=report)
        else:
            why = trouble or DoctorFault(report.ended or "it ended before all cases had run")
            yield Swept(version=version, file=file, report=report, trouble=str(why), exit_code=why.exit_code)


def _run_version(sweep: Sweep, version: str) -> CannotRun | DoctorFault | None:
    """Installs and probes; returns why there is no result, or None where the probe ran to its end."""
    file = sweep.file(version)
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".environment-", dir=sweep.directory) as scratch,
            open(file.with_suffix(".log"), "w", encoding="utf-8") as log,
        ):
            _print_progress(f"torch {version}: installing")
            try:
                python = make_environment(
                    pathlib.Path(scratch, "environment"), [_requirement(version), *sweep.requirements], log
                )
            except CannotRun as reason:
                return CannotRun(f"torch {version} does not install: {reason}")
            os.mkdir(os.path.join(scratch, "doctor"))
            program = Program(python, copy_of_the_doctor(pathlib.Path(scratch, "doctor")))
            options = [*sweep.options, *_device_options(sweep.options, program)]
            _print_progress(f"torch {version}: running")
            return program.probe([*options, "--json", str(file), "--resume"], file.with_suffix(".log"))
    except OSError as error:
        raise DoctorFault(f"cannot make an environment in {sweep.directory}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Program:
    """fsdp-doctor in an environment of its own. path: the directory of its package."""

    python: pathlib.Path
    path: pathlib.Path

    def probe(self, options: Sequence[str], log: pathlib.Path) -> CannotRun | DoctorFault | None:
        """Runs ``fsdp-doctor probe``; returns why it gave no whole report.

        A verdict that is not the expected one is a result. Raises UsageError for options that the probe does not
        take, Interrupted where a signal ended it: either would end the next version, too.
        """
        command = [str(self.python), "-m", "fsdp_doctor", "probe", *options, "--format", "lines"]
        with (
            open(log, "a", encoding="utf-8") as file,
            # Where this process is to end, the probe writes its partial report first.
            child_process(
                command, subprocess.Popen.terminate, stdout=file, stderr=file, env=self._variables
            ) as process,
        ):
            code = process.wait()
        sentence = _last_sentence(log)
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

    def accelerators(self) -> list[str]:
        """Names of the accelerators that its torch sees."""
        command = [str(self.python), "-m", "fsdp_doctor", "env", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self._variables)
        try:
            names: list[str] = json.loads(done.stdout)["accelerators"]
        except (ValueError, KeyError):
            return []
        return names

    def torch(self) -> str:
        """The version of torch that was installed."""
        command = [str(self.python), "-c", "import importlib.metadata as m; print(m.version('torch'))"]
        return subprocess.run(command, capture_output=True, text=True, env=self._variables).stdout.strip()

    @property
    def _variables(self) -> dict[str, str]:
        return variables_of_another_python(PYTHONPATH=str(self.path))


def _device_options(options: Sequence[str], program: Program) -> list[str]:
    """Before torch 2.10 there is no emulated device: the CPU, where torch sees no accelerator."""
    if "--device" in _words(options):
        return []
    if at_least(program.torch(), OLDEST_EMULATED_TORCH) or program.accelerators():
        return []
    return ["--device", "cpu"]


def _requirement(version: str) -> str:
    return f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"


def _earlier(file: pathlib.Path) -> Report | None:
    return read_report(file) if file.exists() else None


def _same_request(sweep: Sweep, report: Report) -> bool:
    same_device = _asked_device(sweep.options) in ("auto", report.device)
    return same_device and _request(shlex.split(report.command)[2:]) == _request(sweep.options)


def _asked_device(options: Sequence[str]) -> str:
    pairs = itertools.pairwise(_words(options))
    return next((value for name, value in pairs if name == "--device"), "auto")


def _request(options: Sequence[str]) -> list[str]:
    """The options that decide which cases run, without the device."""
    words = [home_as_tilde(word) for word in _words(options)]
    kept = []
    while words:
        word = words.pop(0)
        if word in _GIVEN:
            words = words[1:]
        elif word != "--resume":
            kept.append(word)
    return kept


def _words(options: Sequence[str]) -> list[str]:
    """``--device=cpu`` as two words."""
    words = []
    for option in options:
        name, equals, value = option.partition("=")
        words += [name, value] if equals and name in _GIVEN else [option]
    return words


def _report_of_nothing(sweep: Sweep, version: str, trouble: str) -> Report:
    """A version that could not run: a report that says why, so that it is in what is merged from the directory."""
    facts = without_torch()
    facts["packages"] = {"torch": version, **exact_versions(sweep.requirements)}
    return Report(
        version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["fsdp-doctor", "probe", *map(home_as_tilde, sweep.options)]),
        device=_asked_device(sweep.options),
        world_size=0,
        num_selected=0,
        environment=facts,
        ended=trouble,
    )


def _last_sentence(log: pathlib.Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    sentences = [line.removeprefix("fsdp-doctor: ") for line in lines if line.startswith("fsdp-doctor: ")]
    return sentences[-1] if sentences else (lines or [""])[-1]


def _print_progress(text: str) -> None:
    sys.stderr.write(f"fsdp-doctor: {text}\n")
    sys.stderr.flush()
