"""The options of ``fsdp-doctor probe``, read."""

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
    """timeout: seconds for a stage of a case; None follows what the stages of the run have taken.
    start_timeout: seconds for starting workers and building a model.
    grace: seconds for the other ranks once one is in trouble; None: 5, and 2 where they do nothing.
    host_memory: bytes that a worker may hold, None for no limit.
    saved_by: how many ranks save a checkpoint of another number of ranks; None for one more or one less.
    training: the size of the scenarios' steps. with_ledgers: whether the memory of their stages is measured.
    is_verbose: as of the table. outputs: files to write, by format. page: the HTML file to write. expect: with which
    the verdicts are compared.
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
