"""The rooms of the package in their order. CONTRIBUTING.md describes each room."""

from __future__ import annotations

# A room may import from the rooms before it, and from itself.
ROOMS = (
    *("errors", "text", "machine", "checkpoints", "weights", "examination", "matrix", "verdict", "known", "report"),
    *("fixes", "case", "frameworks", "probe", "plugin", "explain", "check", "repro", "bundle", "resume", "plan", "cli"),
)
# The rooms in the wing ``weights``. Each may import from the rooms before it in this list.
ROOMS_OF_WEIGHTS = ("fsdp", "transport", "names", "extract", "load", "fingerprints", "save", "engines")
# The command line imports them before it runs anything, so none of their modules imports torch at its top.
WITHOUT_TORCH = (
    *("errors", "text", "machine", "checkpoints", "matrix", "verdict", "known", "report"),
    *("explain", "check", "repro", "bundle", "cli"),
    *("examination.memory_records", "examination.memory_views"),
    *("fixes.entry", "fixes.sources", "fixes.applying", "fixes.job_hook", "fixes.fixed_job", "fixes.patches"),
)
# The emulated device is independent: it imports nothing of this package.
EMULATED = "emulated"
