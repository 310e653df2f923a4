"""Finds the root cause of a failure in the logs of many ranks, for the command ``fsdp-doctor explain``.

The answer has the entry of the cause in the catalogue of known failures, and a case that reproduces it. The package
does not import torch, reads each log once, and needs the same amount of memory for a log of any size.
"""

from __future__ import annotations

from fsdp_doctor.explain.cause import Explanation, explain

__all__ = ["Explanation", "explain"]
