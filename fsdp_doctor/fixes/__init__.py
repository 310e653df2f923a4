"""Fixes of frameworks' functions: replacements in this library's calls, for releases whose source is known.

entry       what a fix is, and the table of them
sources     finds a function in the installed release, and whether its source is known
applying    replaces it in this process, and refuses what it does not know
fixed_job   runs a user's job with the fixes, and reads what its processes reported
job_hook    runs in the job's processes when a framework is imported
patches     a fix as a patch of the release, with torch alone where ``edits.toml`` has it
sending     what the replacements of senders share
moving      the same for offloads, and a replacement that verl and SkyRL share
on_verl     the replacements for verl; on_skyrl, on_trl, on_peft, on_accelerate, on_lightning, on_transformers for the
            others

Nothing is replaced by default, and nothing is written: a fix lasts as long as the process. The replacements alone
import torch.
"""

from fsdp_doctor.fixes.applying import AppliedFix, apply, use_fix
from fsdp_doctor.fixes.entry import FrameworkFix, list_fixes

__all__ = ["AppliedFix", "FrameworkFix", "apply", "list_fixes", "use_fix"]
