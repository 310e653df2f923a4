"""``fsdp-doctor env``: the facts about this machine that a report has."""

from __future__ import annotations

import json
from typing import Annotated

import typer

NAME = "env"
EXIT_CODES = "Exit codes: 0 printed; 2 usage; 4 the output cannot be written."


def run(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="Include this machine's host name.")] = False,
) -> None:
    """Print the environment section of a report.

    Works where torch cannot be imported, too.
    """
    from fsdp_doctor.machine.environment import collect, lines_of

    facts = collect(host_name)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(lines_of(facts)))
