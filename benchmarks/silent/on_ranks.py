"""Runs programs on a rank of torchrun: ``on_ranks DIRECTORY NAME...``."""

from __future__ import annotations

import json
import logging
import pathlib
import sys
import time
import warnings

import torch
import torch.distributed as dist

from .entries import ERRORS
from .program import Program
from .variants import CLEAN_PROGRAMS


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, *names = sys.argv[1:]
    known = {name: error.code for name, error in ERRORS.items()} | CLEAN_PROGRAMS
    for name in names:
        _run(known[name], pathlib.Path(directory, name))
    dist.destroy_process_group()


def _run(kind: type[Program], place: pathlib.Path) -> None:
    """Runs one program, and writes what any rank found, and why any rank could not run it."""
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    failed, program, begin = "", None, time.monotonic()
    try:
        program = kind(place)
        program.run()
    except Exception as error:
        # An exception of ours is a finding; one of torch means that the program could not run.
        if program is not None and type(error).__module__.startswith("fsdp_doctor"):
            program.report([f"{type(error).__name__}: {error}"])
        else:
            failed = f"{type(error).__name__}: {error}"
    of_ranks: list[tuple[list[str], str]] = [([], "")] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (program.findings if program else [], failed))
    failures = [failure for _, failure in of_ranks if failure]
    if dist.get_rank() == 0:
        found = {
            "findings": list(dict.fromkeys(finding for findings, _ in of_ranks for finding in findings)),
            "failed": "; ".join(failures),
            "seconds": time.monotonic() - begin,
            "commands": program.commands() if program and not failures else [],
        }
        (place / "found.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
