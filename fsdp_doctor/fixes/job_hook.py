"""Applies fixes in the processes of a job under ``fsdp-doctor fix``, when a framework's module, or Ray, is imported.

This module needs only the standard library; it imports this package when it applies a fix. Its options are a JSON
object in the environment variable FSDP_DOCTOR_FIX:

events: the directory in which each process writes a file of JSON lines.
ids: the ids of the fixes to apply.
injected: the directory with which PYTHONPATH must begin.
verify: whether to compare the first sync of each process with the model.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from typing import Any, NoReturn


def read_options() -> dict[str, Any] | None:
    """Returns the options of ``fsdp-doctor fix``; None if this process does not belong to a job that it started."""
    text = os.environ.get("FSDP_DOCTOR_FIX")
    return json.loads(text) if text else None


def write_event(kind: str, **facts: Any) -> None:
    """Appends an event of this process to its file, if ``fsdp-doctor fix`` started the job.

    Each event is written at once, so a process that is killed later loses none.
    """
    options = read_options()
    if options is None:
        return
    facts = {"kind": kind, "process": f"{socket.gethostname()}:{os.getpid()}", **facts}
    name = facts["process"].replace(":", "-")
    try:
        with open(os.path.join(options["events"], f"{name}.jsonl"), "a") as file:
            file.write(json.dumps(facts) + "\n")
    except OSError as error:
        # On a node that `fsdp-doctor fix` does not run on.
        sys.stderr.write(f"fsdp-doctor: fix: the event {kind!r} could not be reported: {error}\n")


def start(imported: str) -> None:
    """Applies the fixes for a module that was just imported. Ends the process if a fix is refused."""
    options = read_options()
    if options is None:
        return
    if imported == "ray":
        _check_environments_of_workers(options["injected"])
        return
    try:
        from fsdp_doctor.errors import FsdpDoctorError
        from fsdp_doctor.fixes import applying
    except ImportError as error:
        _refuse(f"fsdp-doctor cannot be imported by the job's Python, {sys.executable} ({error}): install it there")
    try:
        applying.apply_to_module(imported, options["ids"])
    except FsdpDoctorError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    write_event("refused", reason=reason)
    sys.stderr.write(f"fsdp-doctor: {reason}\n")
    raise SystemExit(3)


def _check_environments_of_workers(injected: str) -> None:
    """Makes ``ray.init`` refuse a PYTHONPATH for workers that would prevent the fix from reaching them."""
    ray = sys.modules["ray"]
    original = ray.init

    @functools.wraps(original)
    def init(*arguments: Any, **options: Any) -> Any:
        runtime_env = options.get("runtime_env")
        given = runtime_env.get("env_vars", {}).get("PYTHONPATH") if isinstance(runtime_env, dict) else None
        if given is not None and injected not in given.split(os.pathsep):
            _refuse(
                "the job gives its Ray workers a PYTHONPATH of their own (runtime_env), so the fix would not "
                f"reach the workers; set PYTHONPATH to {injected}{os.pathsep}{given}"
            )
        return original(*arguments, **options)

    ray.init = init  # type: ignore[attr-defined]
