"""How a command that needs several ranks gets them: the options for it, and what is checked first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NoReturn

import typer

from fsdp_doctor.cli import values
from fsdp_doctor.machine import devices, launch, versions

_NEEDED = {"torch": "2.6", "transformers": "4.56"}


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    PANEL: ClassVar[str] = "Ranks and devices"

    device: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(devices.NAMES)}. auto is the accelerator that torch sees, or else emulated."
        ),
    ] = "auto"
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks to start when not run under torchrun.  "
            "[default: one per accelerator, or 2 without one]"
        ),
    ] = None

    def check(self) -> None:
        values.device(self.device)
        if self.nproc is not None:
            values.positive("--nproc", self.nproc)


def check_versions() -> None:
    """Raises CannotRun where torch or transformers is missing or too old. Imports neither."""
    for package, oldest in _NEEDED.items():
        versions.require(package, oldest)


def start_ranks(ranks: RankOptions, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs this program again under torchrun and exits as rank 0 does.

    arguments: of the program, as they are on this command line where they are left out.
    """
    nproc = ranks.nproc or launch.num_ranks(ranks.device)
    raise SystemExit(launch.start_torchrun(sys.argv[1:] if arguments is None else arguments, nproc))
