"""Makes the report of a run before any case runs.

The report has the selected cases and the facts about the machine. A run that continues an earlier report begins with
the earlier report instead.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import launch
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.environment import collect_without_torch, write_home_as_tilde
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.axes import CheckpointFit
from fsdp_doctor.matrix.cases import Case, list_frameworks
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, read_matrix
from fsdp_doctor.probe.probe_options import ProbeOptions
from fsdp_doctor.report.document import AppliedShim, Report, make_context
from fsdp_doctor.text import format_count

ON_THE_CPU = (
    "The device is the CPU: an offload from the CPU to the CPU moves nothing, so the failures that "
    "offloading causes cannot show here. CPUOffloadPolicy runs unpinned: there is nothing to pin memory for."
)
ON_THE_EMULATED_DEVICE = (
    "The device is emulated in host memory: torch's FSDP code is real, but the accelerator is not, and the times "
    "say nothing about a GPU."
)
EAGER = "Late completion is off: non-blocking copies finished at once, so their races cannot show."


def make_first_report(options: ProbeOptions, place: launch.Place, device: RunDevice, saved_by: int) -> Report:
    """Makes the report of a run on ``device`` before any case has run.

    Raises UsageError if the results of the earlier report cannot be combined with those of this run.

    saved_by: the number of ranks that save a checkpoint for a load on another number of ranks.
    """
    shims = _list_shims(options, device)
    facts = collect_without_torch(options.host_name)
    of_frameworks = [name for matrix in _list_matrices(options) for name in matrix.distributions]
    report = Report(
        version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=write_home_as_tilde(shlex.join(["fsdp-doctor", *sys.argv[1:]])),
        device=device.type,
        world_size=place.world_size,
        num_selected=len(options.cases),
        environment={**facts, "packages": facts["packages"] | read_installed_versions(of_frameworks)},
        rerun_options=_rerun_options(options, place),
        late_completion=device.late_completion,
        notes=tuple(_list_notes(options, device, saved_by, shims)),
        shims=shims,
    )
    earlier = options.resume_from
    if earlier is None:
        return report
    if (was := _describe_conditions(earlier)) != (now := _describe_conditions(report)):
        raise UsageError(
            f"--resume: the report is of {was}, but this run is of {now}; their results cannot be combined; leave "
            "out --resume to start again"
        )
    selected = set(options.cases)
    return dataclasses.replace(
        earlier,
        command=report.command,
        num_selected=report.num_selected,
        results=tuple(r for r in earlier.results if r.case in selected and r.verdict.kind != "lost"),
    )


def _list_shims(options: ProbeOptions, device: RunDevice) -> tuple[AppliedShim, ...]:
    """Lists the shims of the installed frameworks. There are shims only on the emulated device."""
    if device.type != "emulated":
        return ()
    return tuple(
        AppliedShim(framework=matrix.name, **dataclasses.asdict(shim))
        for matrix in _list_matrices(options)
        if read_installed_versions(matrix.distributions[:1])
        for shim in matrix.shims
    )


def _list_matrices(options: ProbeOptions) -> list[FrameworkMatrix]:
    return [read_matrix(name) for name in list_frameworks(options.cases)]


def _describe_conditions(report: Report) -> str:
    """Describes the conditions under which all results of a report were made, with the device that was found."""
    asked = f"--device {report.device}"
    options = " ".join(report.rerun_options.replace(asked, "").split())
    ranks = f"{format_count(report.world_size, 'rank')} of {report.device}"
    return f"{ranks} with torch {make_context(report).torch} and options {options!r}"


def _list_notes(options: ProbeOptions, device: RunDevice, saved_by: int, shims: Sequence[AppliedShim]) -> Iterator[str]:
    if device.type == "cpu":
        yield ON_THE_CPU
    if device.type == "emulated":
        yield ON_THE_EMULATED_DEVICE
        if not device.late_completion:
            yield EAGER
    # The id of a case does not show the number of ranks that save its checkpoint.
    of_matrix = [case.scenario for case in options.cases if isinstance(case, Case)]
    if saved_by and any(scenario.checkpoint is CheckpointFit.OTHER_WORLD for scenario in of_matrix):
        yield f"A checkpoint of other-world is saved by {format_count(saved_by, 'rank')}."
    for framework in dict.fromkeys(shim.framework for shim in shims):
        names = ", ".join(shim.name for shim in shims if shim.framework == framework)
        yield f"These names were changed in the workers, so that {framework} finds the emulated device: {names}."
    for matrix in _list_matrices(options):
        if sentence := matrix.describe_untried(read_installed_versions(matrix.tried)):
            yield sentence


def _rerun_options(options: ProbeOptions, place: launch.Place) -> str:
    """Returns the options that a command needs to run one case alone."""
    words = ["--nproc", str(place.world_size)] if place.num_nodes == 1 else []
    if options.device.type != "auto":
        words += ["--device", options.device.type]
    if options.device.memory is not None:
        words += ["--device-memory", str(options.device.memory)]
    if not options.device.late_completion:
        words += ["--no-late-completion"]
    if options.model is not None:
        words += ["--model", write_home_as_tilde(str(options.model))]
    if options.saved_by is not None:
        words += ["--saved-by", str(options.saved_by)]
    if options.host_memory is not None:
        words += ["--host-memory", str(options.host_memory)]
    return shlex.join(words)
