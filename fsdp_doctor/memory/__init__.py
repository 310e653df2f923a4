"""The memory of a job on this rank's device and host, by class.

snapshot      the ledger of a live job
stage_watch   the ledgers of the stages of a job, by watching every operator
"""

from __future__ import annotations

from fsdp_doctor.memory.snapshot import ledger

__all__ = ["ledger"]
