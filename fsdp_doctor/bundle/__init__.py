"""``fsdp-doctor bundle``: writes a bug report in one file, without anything private. It does not import torch.

``command_run`` runs a command and takes the stacks of its ranks. ``evidence`` gathers texts. ``redaction`` replaces
private text in all of them by the rules in private_text.toml. ``issue`` writes issue.md and the zip file.
"""

from __future__ import annotations

from fsdp_doctor.bundle.command_run import CommandRun, run
from fsdp_doctor.bundle.evidence import FailureEvidence, gather, make_readable_file
from fsdp_doctor.bundle.issue import Bundle, make_bundle, write_bundle

__all__ = [
    "Bundle",
    "CommandRun",
    "FailureEvidence",
    "gather",
    "make_bundle",
    "make_readable_file",
    "run",
    "write_bundle",
]
