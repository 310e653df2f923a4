"""The rooms of the package, in their order. CONTRIBUTING.md says what each is for."""

from __future__ import annotations

# A room may import from the rooms before it, and from itself.
ROOMS = (
    *("errors", "text", "machine", "matrix", "memory_use", "verdict", "known", "report", "versions", "page"),
    "checkpoints",
    *("fsdp", "names", "memory", "extract", "load", "fingerprints", "save", "engines", "examination", "case"),
    *("frameworks", "probe", "plugin", "explain", "check", "repro", "bundle", "resume", "plan", "cli"),
)
# The command line imports them before it runs anything, so none of their modules imports torch at its top.
WITHOUT_TORCH = (
    *("errors", "text", "machine", "matrix", "memory_use", "verdict", "known", "report", "versions", "page"),
    *("checkpoints", "explain", "check", "repro", "bundle", "cli"),
)
# It stands alone: it imports nothing of ours.
EMULATED = "emulated"
