"""The rooms of the package, in their order."""

from __future__ import annotations

# A room may import from the rooms before it, and from itself. CONTRIBUTING.md says what each is for.
ROOMS = (
    *("errors", "machine", "matrix", "ledgers", "verdict", "known", "report", "versions", "page"),
    *(
        "fsdp",
        "memory",
        "extract",
        "load",
        "fingerprints",
        "engines",
        "examination",
        "case",
        "frameworks",
        "probe",
        "plugin",
    ),
    *("explain", "check", "repro", "bundle", "plan", "bench", "cli"),
)
# It stands alone: it imports nothing of ours.
EMULATED = "emulated"
