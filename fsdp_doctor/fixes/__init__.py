"""Replaces functions of frameworks by functions of this library, for releases whose source is known.

entry       the type of a fix, and the table of all fixes
sources     finds a function in the installed release, and checks whether its source is known
applying    replaces the function in this process, and refuses a source that is not known
fixed_job   runs a user's job with fixes, and reads the reports of its processes
job_hook    applies fixes in the job's processes when a framework is imported
patches     writes fixes as a patch of the release, which needs only torch if ``edits.toml`` has the fix
sending     functions that the replacements for weight syncs share
moving      functions that the replacements for offloads share, and a replacement for both verl and SkyRL
on_verl     the replacements for verl; on_skyrl, on_trl, on_peft, on_accelerate, on_lightning, on_transformers for the
            others

Nothing is replaced by default, and no file is changed: a fix lasts as long as the process. Only the replacements
import torch.
"""

from fsdp_doctor.fixes.applying import AppliedFix, apply, use_fix
from fsdp_doctor.fixes.entry import FrameworkFix, list_fixes

__all__ = ["AppliedFix", "FrameworkFix", "apply", "list_fixes", "use_fix"]
