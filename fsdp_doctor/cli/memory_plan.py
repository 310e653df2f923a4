"""``fsdp-doctor memory plan``: predicts the memory of a training job before it runs."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdp_doctor.cli import files, starting, values
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES, MOST_LAYERS

if TYPE_CHECKING:
    from fsdp_doctor.plan.job import PlanOptions

NAME = "plan"
EXIT_CODES = (
    "Exit codes: 0 it fits; 1 it does not; 2 usage; 3 it is not FSDP, or transformers is missing; "
    "4 the doctor's own fault."
)
# Fewer bytes are a number without a unit, meant in GiB.
_NO_MEMORY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobSizeOptions:
    PANEL: ClassVar[str] = "Job"

    model: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(MODEL_SHAPES)}; or a directory with a config.json.  [default: as configured]"),
    ] = None
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers, instead of the model's own.")] = None
    gpus: Annotated[int | None, typer.Option(help="Devices of each node.  [default: as configured, else 8]")] = None
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.  [default: as configured]")] = None
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Of each device.")] = "80GiB"
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each node.")] = None
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.  [default: as configured]")] = None
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences that are computed at once.  [default: as configured]")
    ] = None

    def read(self, framework_version: str | None) -> PlanOptions:
        from fsdp_doctor.plan.job import PlanOptions

        numbers = {
            "--layers": self.layers,
            "--gpus": self.gpus,
            "--nodes": self.nodes,
            "--seq-len": self.seq_len,
            "--micro-batch": self.micro_batch,
        }
        for option, number in numbers.items():
            if number is not None:
                values.positive(option, number)
        if self.layers is not None and self.layers > MOST_LAYERS:
            raise UsageError(f"--layers {self.layers}: at most {MOST_LAYERS}")
        if self.model is not None and not self.model.strip():
            raise UsageError("--model: give a name or a directory")
        if self.model is not None and self.model not in MODEL_SHAPES:
            values.model_directory(self.model, MODEL_SHAPES)
        return PlanOptions(
            model=self.model,
            layers=self.layers,
            gpus=self.gpus,
            nodes=self.nodes,
            gpu_memory=_memory("--gpu-memory", self.gpu_memory),
            host_memory=_memory("--host-memory", self.host_memory) if self.host_memory is not None else None,
            length=self.seq_len,
            sequences=self.micro_batch,
            framework_version=framework_version,
        )


def _memory(option: str, text: str) -> int:
    nbytes = values.size(option, text)
    if nbytes < _NO_MEMORY:
        raise UsageError(f"{option} {text}: that is {nbytes} bytes; give a unit, as in 80GiB")
    return nbytes


def run(
    *,
    config: Annotated[
        list[str],
        typer.Option(help="What `fsdp-doctor check` reads: a file, - or an override a.b=value; can be repeated."),
    ],
    job: JobSizeOptions,
    framework_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of the framework, as for check.")
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write the predicted ledgers.")
    ] = None,
    svg: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write a picture of the stages.")] = None,
) -> None:
    """Predict the memory of a training job on each device and host, without a GPU and without weights.

    Prints each stage of each model, what shares a device at once, and where it does not fit, each setting that
    alone makes it fit.
    """
    given = {name: file for name, file in (("--json", json_file), ("--svg", svg)) if file is not None}
    files.check_distinct(given)
    for file in given.values():
        files.check_writable(file)
    options = job.read(framework_version)
    from fsdp_doctor.plan.job import read_job

    job_setup = read_job(config, options)
    starting.check_versions()
    from fsdp_doctor.ledgers.ledger_views import ledgers_svg
    from fsdp_doctor.plan.job_plan import Planner
    from fsdp_doctor.plan.plan_text import plan_as_json, plan_as_text

    planner = Planner()
    plan = planner.plan(job_setup)
    sys.stdout.write(plan_as_text(plan, planner.advise(plan)))
    if json_file is not None:
        files.write(json_file, plan_as_json(plan))
    if svg is not None:
        files.write(svg, ledgers_svg(ledger for role in plan.roles for ledger in role.first))
    raise SystemExit(EXIT_OK if plan.fits else EXIT_BAD_VERDICT)
