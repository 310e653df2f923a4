"""Makes the bug report of ``fsdp-doctor bundle``: one file, without private text. The package does not import torch.

``command_run`` runs a command and takes the stacks of its ranks. ``evidence`` gathers the texts of the report.
``redaction`` replaces private text by the rules in private_text.toml. ``issue`` writes issue.md and the zip file.
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
