"""Runs programs on a rank of torchrun: ``on_ranks DIRECTORY NAME...``."""

from __future__ import annotations

import logging
import sys
import warnings

import torch
import torch.distributed as dist

from . import programs
from .entries import ERRORS
from .variants import CLEAN_PROGRAMS


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, *names = sys.argv[1:]
    known = {name: error.code for name, error in ERRORS.items()} | CLEAN_PROGRAMS
    programs.run_all(names, directory, known)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
