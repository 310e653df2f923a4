"""``fsdp-doctor bundle``: all that a bug report needs in one file, and nothing private in it.

Without torch. ``command_run`` runs a command and ``rank_stacks`` asks its ranks where they are; ``contents`` gathers
what is known as texts; ``redaction`` replaces what is private in all of them; ``issue`` makes an issue of what is left.
"""

from __future__ import annotations

from fsdp_doctor.bundle.archive import Bundle, bundle_of, write_bundle
from fsdp_doctor.bundle.command_run import CommandRun, run
from fsdp_doctor.bundle.contents import Gathered, gather
from fsdp_doctor.bundle.log_excerpt import as_file

__all__ = ["Bundle", "CommandRun", "Gathered", "as_file", "bundle_of", "gather", "run", "write_bundle"]
