"""The parsed options of ``fsdp-doctor probe``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize
from fsdp_doctor.probe.baseline import Baseline
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.formats import AnyFormat


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The parsed options of ``fsdp-doctor probe``.

    timeout: seconds without progress in a stage of a case; None derives the limit from the durations of the run's
        stages.
    start_timeout: seconds for starting workers and building a model.
    grace: seconds that the other ranks have once one rank is in trouble; None means 5, or 1 if they are idle.
    host_memory: the most bytes of host memory that a worker may hold; None for no limit.
    saved_by: the number of ranks that save a checkpoint for a load on another number of ranks; None for one more or one
        less than this run's number.
    training: the size of the scenarios' training steps.
    with_ledgers: whether the memory of each stage is measured.
    is_verbose: whether the table shows all details.
    outputs: maps a format to the file to write it to.
    page: the HTML file to write.
    expect: the baseline that the verdicts are compared with.
    """

    cases: tuple[AnyCase, ...]
    device: RunDevice = dataclasses.field(default_factory=RunDevice)
    model: pathlib.Path | None = None
    timeout: float | None = None
    start_timeout: float = 300.0
    grace: float | None = None
    host_memory: int | None = None
    saved_by: int | None = None
    confirm: bool = False
    training: TrainingSize = SMALL_STEP
    with_ledgers: bool = False
    format: AnyFormat | Literal["auto"] = "auto"
    is_verbose: bool = False
    outputs: Mapping[AnyFormat, pathlib.Path] = dataclasses.field(default_factory=dict)
    page: pathlib.Path | None = None
    expect: Baseline = "known"
    resume_from: Report | None = None
    host_name: bool = False
