"""Logs that a test writes line by line, and the results of ``explain`` on them."""

from __future__ import annotations

import pathlib

from fsdp_doctor.explain import Explanation, explain
from fsdp_doctor.explain.exceptions import Raised

UNSHARD = "AssertionError: Expects tensor to be on the compute device cuda:{}, was on cpu"
STORAGE = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"cuda:{}".  This is no longer allowed; the devices must match.'
)
DURING = "During handling of the above exception, another exception occurred:"
BEGIN = "Traceback (most recent call last):"


def traceback(raised: str) -> list[str]:
    """Returns the lines of a traceback through ``state_dict()``."""
    return [
        BEGIN,
        '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in rollout_mode',
        "    params = self.actor_module_fsdp.state_dict()",
        '  File "/opt/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 2256, in state_dict',
        "    hook(self, prefix, keep_vars)",
        raised,
    ]


def written(tmp_path: pathlib.Path, *lines: str) -> pathlib.Path:
    """Writes a log with these lines, and returns its path."""
    file = tmp_path / "log.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def explained(tmp_path: pathlib.Path, *lines: str) -> Explanation:
    return explain([written(tmp_path, *lines)])


def entry_of(explanation: Explanation) -> str:
    """Returns the id of the entry that the explanation is certain about; empty if there is none."""
    return explanation.entry.id if explanation.entry is not None else ""


def cause_of(explanation: Explanation) -> Raised:
    assert explanation.cause is not None
    return explanation.cause.first
