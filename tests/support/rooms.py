"""The rooms of the package, in their order. CONTRIBUTING.md says what each is for."""

from __future__ import annotations

# A room may import from the rooms before it, and from itself.
ROOMS = (
    *("errors", "text", "machine", "checkpoints", "weights", "examination", "matrix", "verdict", "known", "report"),
    *("fixes", "case", "frameworks", "probe", "plugin", "explain", "check", "repro", "bundle", "resume", "plan", "cli"),
)
# So may a room within the wing ``weights``, of that wing's.
ROOMS_OF_WEIGHTS = ("fsdp", "transport", "names", "extract", "load", "fingerprints", "save", "engines")
# The command line imports them before it runs anything, so none of their modules imports torch at its top.
WITHOUT_TORCH = (
    *("errors", "text", "machine", "checkpoints", "matrix", "verdict", "known", "report"),
    *("explain", "check", "repro", "bundle", "cli"),
    *("examination.memory_records", "examination.memory_views"),
    *("fixes.entry", "fixes.sources", "fixes.applying", "fixes.job_hook", "fixes.fixed_job", "fixes.patches"),
)
# It stands alone: it imports nothing of ours.
EMULATED = "emulated"
