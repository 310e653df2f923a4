"""Fixes of frameworks' functions: replacements in this library's calls, for releases whose source is known.

entry       what a fix is, and the table of them; no torch
applying    finds the function, refuses what it does not know, and replaces it in this process
on_verl     the replacements for verl

Nothing is replaced by default, and nothing is written: a fix lasts as long as the process.
"""

from fsdp_doctor.fixes.applying import AppliedFix, apply
from fsdp_doctor.fixes.entry import FrameworkFix, list_fixes

__all__ = ["AppliedFix", "FrameworkFix", "apply", "list_fixes"]
