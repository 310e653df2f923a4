"""Runs in the processes of a user's job under ``fsdp-doctor fix``, once a framework's module, or Ray, is imported.

It needs the standard library, and this package where a function is replaced. The variable FSDP_DOCTOR_FIX is a JSON
object. events: the directory that gets a file of JSON lines for each process. ids: the fixes to apply. injected: what
PYTHONPATH must begin with. verify: whether the first sync of each process is compared with the model.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from typing import Any, NoReturn


def read_options() -> dict[str, Any] | None:
    """Reads what ``fsdp-doctor fix`` asks of this process; None where the process was not started by it."""
    text = os.environ.get("FSDP_DOCTOR_FIX")
    return json.loads(text) if text else None


def write_event(kind: str, **facts: Any) -> None:
    """Appends an event of this process, if ``fsdp-doctor fix`` started the job. A killed process loses none."""
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
        sys.stderr.write(f"fsdp-doctor: fix: {kind} is not reported: {error}\n")


def start(imported: str) -> None:
    """Applies the fixes of a module that has been imported. Ends the process where one is refused."""
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
    """Has ``ray.init`` refuse a PYTHONPATH for workers that would keep the fix from them."""
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
