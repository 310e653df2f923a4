"""The probe in an environment of its own for each version of torch: one report each, kept and gone on with."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_doctor import __version__
from fsdp_doctor.errors import CannotRun, DoctorFault, Interrupted, UsageError
from fsdp_doctor.machine.environment import home_as_tilde, without_torch
from fsdp_doctor.machine.versions import at_least
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report, write_report
from fsdp_doctor.versions.child_process import child_process
from fsdp_doctor.versions.installing import (
    copy_of_the_doctor,
    exact_versions,
    make_environment,
    variables_of_another_python,
)

# As fsdp_doctor/emulated/build.py has it, which imports torch.
OLDEST_EMULATED_TORCH = "2.10"
# Options of the probe that the sweep gives itself, or that say only where the result goes.
_GIVEN = ("--json", "--device", "--format")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to run.

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
    """Each version, one after the other; its environment is removed before the next one's is made."""
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
            _say(f"torch {version}: installing")
            try:
                python = make_environment(
                    pathlib.Path(scratch, "environment"), [_requirement(version), *sweep.requirements], log
                )
            except CannotRun as reason:
                return CannotRun(f"torch {version} does not install: {reason}")
            os.mkdir(os.path.join(scratch, "doctor"))
            program = Program(python, copy_of_the_doctor(pathlib.Path(scratch, "doctor")))
            options = [*sweep.options, *_device_options(sweep.options, program)]
            _say(f"torch {version}: running")
            return program.probe([*options, "--json", str(file), "--resume"], file.with_suffix(".log"))
    except OSError as error:
        raise DoctorFault(f"cannot make an environment in {sweep.directory}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Program:
    """The doctor in an environment of its own. path: the directory that its package is in."""

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
        said = _last_sentence(log)
        match code:
            case 0 | 1:
                return None
            case UsageError.exit_code:
                raise UsageError(said)
            case CannotRun.exit_code:
                return CannotRun(said)
            case Interrupted.exit_code:
                raise Interrupted(said)
            case _:
                return DoctorFault(f"the probe ended with exit code {code}: {said}")

    def accelerators(self) -> list[str]:
        """The names of those that its torch sees."""
        command = [str(self.python), "-m", "fsdp_doctor", "env", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self._variables)
        try:
            found: list[str] = json.loads(done.stdout)["accelerators"]
        except (ValueError, KeyError):
            return []
        return found

    def torch(self) -> str:
        """The version that was installed."""
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
    """What decides what runs, beside the device."""
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
    said = [line.removeprefix("fsdp-doctor: ") for line in lines if line.startswith("fsdp-doctor: ")]
    return said[-1] if said else (lines or [""])[-1]


def _say(text: str) -> None:
    sys.stderr.write(f"fsdp-doctor: {text}\n")
    sys.stderr.flush()
