"""Finds the root cause in a log of many ranks, its entry in the catalogue of known failures, and a reproducing case.

The command ``fsdp-doctor explain`` does this. It does not import torch, reads each log once, and needs the same amount
of memory for a log of any size.
"""

from __future__ import annotations

from fsdp_doctor.explain.cause import Explanation, explain

__all__ = ["Explanation", "explain"]
