"""``python -m fsdp_doctor.emulated.build``: builds the device's library, and with ``--wheel`` packs it."""

from __future__ import annotations

import argparse
import pathlib
import sys

from fsdp_doctor.emulated.build import library
from fsdp_doctor.emulated.build.wheel import pack


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_doctor.emulated.build", description=__doc__)
    parser.add_argument(
        "--wheel",
        nargs="?",
        const=pathlib.Path("dist"),
        type=pathlib.Path,
        metavar="DIR",
        help="write a wheel for machines without a compiler, of this torch and this Python, into DIR (dist)",
    )
    directory = parser.parse_args().wheel
    made = library() if directory is None else pack(library(), directory)
    sys.stdout.write(f"{made}\n")


if __name__ == "__main__":
    main()
