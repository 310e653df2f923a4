"""``fsdp-doctor memory measure`` and ``plan``: measure or predict the memory of a job."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdp_doctor.cli import options, output, probe
from fsdp_doctor.cli.options import (
    DeviceOptions,
    declare_choice,
    declare_model_shape,
    declare_output_file,
    declare_size,
    declare_words,
)
from fsdp_doctor.cli.selection import Selected, SelectionOptions, declare_axis
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.machine.terminal import measure_width
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize
from fsdp_doctor.plan.job import MOST_LAYERS

if TYPE_CHECKING:
    from fsdp_doctor.report.formats import AnyFormat

MEASURE_EXIT_CODES = (
    "Exit codes: 0 measured; 1 measured, and a case broke; 2 usage; 3 cannot run here, or no stage could be measured; "
    "4 the doctor's own fault; 130 interrupted."
)
PLAN_EXIT_CODES = (
    "Exit codes: 0 the job fits; 1 the job does not fit; 2 usage; 3 the job is not FSDP, or transformers is "
    "missing; 4 the doctor's own fault."
)
_FORMATS: dict[str, AnyFormat] = {"table": "memory", "json": "memory-json", "svg": "memory-svg"}
# Fewer bytes are a number without a unit, meant in GiB.
_LEAST_MEMORY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    PANEL: ClassVar[str] = "Job"

    strategy: Annotated[list[str] | None, declare_axis("strategy", "fsdp2")] = None
    offload: Annotated[list[str] | None, declare_axis("offload", "none,param+optimizer,policy")] = None
    staging: Annotated[list[str] | None, declare_axis("staging", "staged")] = None
    sharding: Annotated[list[str] | None, declare_axis("sharding", "full")] = None
    pinning: Annotated[list[str] | None, declare_axis("pinning", "pinned")] = None
    model: Annotated[
        list[str] | None,
        declare_words(help="A built-in model (see `fsdp-doctor list --axes`), or the directory of a configuration."),
    ] = None
    method: Annotated[
        list[str] | None,
        declare_words(
            "--method",
            help="The method that extracts; module:function adds your own.  [default: full_tensors]",
        ),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each rank in a training step.")] = SMALL_STEP.batch
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = SMALL_STEP.sequence
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Compute decoder layers anew in the backward.")
    ] = False

    def select(self) -> Selected:
        """Selects one scenario for each combination of the values, with the named methods.

        Raises the same errors as SelectionOptions.select.
        """
        methods = self.method or ["full_tensors"]
        selected = SelectionOptions(
            direction="out",
            strategy=self.strategy,
            offload=self.offload,
            staging=self.staging,
            sharding=self.sharding,
            pinning=self.pinning,
            model=self.model or ["qwen3"],
            dims=["even"],
            phase=["trained"],
            backend=["mixed"],
            transfer=["blocking"],
            precision=["bf16-compute"],
            optimizer=["adamw"],
            context=["ordinary"],
            method=methods,
        ).select()
        # With a function of the user, a probe runs all methods of the matrix, too.
        return dataclasses.replace(selected, cases=tuple(case for case in selected.cases if case.method in methods))


def measure(
    *,
    job: JobOptions,
    ranks: DeviceOptions,
    format: Annotated[str, declare_choice(_FORMATS, help="Of stdout:")] = "table",
    json_file: Annotated[pathlib.Path | None, declare_output_file("--json", help="Write every rank's ledgers.")] = None,
    svg: Annotated[pathlib.Path | None, declare_output_file(help="Write the picture.")] = None,
    html: Annotated[
        pathlib.Path | None, declare_output_file(help="Write the picture into a page, with the verdicts.")
    ] = None,
) -> None:
    """Measure the memory of each rank at each stage of a job, by class.

    The job is built, trained, offloaded, staged, extracted from, offloaded again, loaded, and trained on. Under
    torchrun it runs on torchrun's ranks; otherwise this command starts ranks on this node.

    An option that takes a list can be repeated, or take several values separated by commas.
    """
    from fsdp_doctor.probe.probe_options import ProbeOptions

    selected = job.select()
    outputs: dict[AnyFormat, pathlib.Path | None] = {"memory-json": json_file, "memory-svg": svg}
    probe.conduct(
        ProbeOptions(
            cases=selected.cases,
            device=ranks.run_device,
            model=selected.model,
            training=TrainingSize(batch=job.batch, sequence=job.sequence, checkpointing=job.activation_checkpointing),
            with_ledgers=True,
            format=_FORMATS[format],
            outputs={name: file for name, file in outputs.items() if file is not None},
            page=html,
        ),
        ranks,
    )


@dataclass(frozen=True, kw_only=True)
class JobSizeOptions:
    PANEL: ClassVar[str] = "Job"

    model: Annotated[str | None, declare_model_shape(help="  [default: as configured]")] = None
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_LAYERS, help="Number of decoder layers, instead of the model's own."),
    ] = None
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices of each node.  [default: as configured, else 8]")] = (
        None
    )
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.  [default: as configured]")] = None
    gpu_memory: Annotated[int, declare_size(help="Of each device.", show_default="80GiB")] = 80 << 30
    host_memory: Annotated[int | None, declare_size(help="Of each node.")] = None
    length: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Tokens of a sequence.  [default: as configured]")
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option("--micro-batch", min=1, help="Sequences in one forward.  [default: as configured]"),
    ] = None


def plan(
    *,
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Directory of a model, planned as accelerate trains it with FSDP2. Not together with --config.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="Configuration as for `fsdp-doctor check`: a file, - or an override a.b=value. Can be repeated."
        ),
    ] = None,
    job: JobSizeOptions,
    framework_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Version of the framework, as for `fsdp-doctor check`.")
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, declare_output_file("--json", help="Write the predicted ledgers.")
    ] = None,
    svg: Annotated[pathlib.Path | None, declare_output_file(help="Write a picture of the stages.")] = None,
) -> None:
    """Predict the memory of a training job on each device and host, without a GPU and without weights.

    Prints each stage of each model, and the models that share a device at one time. If these models do not fit, prints
    each single setting that makes them fit.
    """
    for option, memory in (("--gpu-memory", job.gpu_memory), ("--host-memory", job.host_memory)):
        if memory is not None and memory < _LEAST_MEMORY:
            raise UsageError(f"{option} {memory}: that is {memory} bytes; give a unit, as in 80GiB")
    from fsdp_doctor.plan.configured_job import PLAIN_FSDP2, PlanOptions, read_job

    if directory is not None:
        if config or job.model is not None:
            raise UsageError(
                f"{directory}: with --config, give the model with --model; without --config, give only DIR"
            )
        config, job = [*PLAIN_FSDP2], dataclasses.replace(job, model=directory)
    if not config:
        raise UsageError("give --config, or the directory of a model")
    job_setup = read_job(config, PlanOptions(framework_version=framework_version, **vars(job)))
    options.check_versions()
    from fsdp_doctor.examination.memory_views import render_memory_svg
    from fsdp_doctor.plan.job_plan import Planner
    from fsdp_doctor.plan.plan_text import render_plan_json, render_plan_text

    planner = Planner()
    plan = planner.plan(job_setup)
    sys.stdout.write(render_plan_text(plan, planner.advise(plan), measure_width(160)))
    if json_file is not None:
        output.write(json_file, render_plan_json(plan))
    if svg is not None:
        output.write(svg, render_memory_svg(stage_memory for role in plan.roles for stage_memory in role.first))
    raise SystemExit(EXIT_OK if plan.fits else EXIT_BAD_VERDICT)
