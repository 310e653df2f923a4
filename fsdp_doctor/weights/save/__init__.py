"""Saves a sharded model, or its optimizer's state: every rank writes its own rows at their positions in the files.

full_save        save_full_tensors: one save from its arguments to its report
optimizer_save   save_optimizer_state
ranks            the ranks that take part, the rank that writes a tensor held by several ranks, and the written amounts
regions          where the elements of a shard belong in a file
writing          a rank's writes: staging, threads, checksums
directory        unfinished files, and how they get their final names
"""

from fsdp_doctor.weights.save.directory import SaveError
from fsdp_doctor.weights.save.full_save import SaveReport, save_full_tensors
from fsdp_doctor.weights.save.optimizer_save import save_optimizer_state

__all__ = ["SaveError", "SaveReport", "save_full_tensors", "save_optimizer_state"]
