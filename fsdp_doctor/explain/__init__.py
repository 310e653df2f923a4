"""``fsdp-doctor explain``: from a log of many ranks to the root cause, what is known of it, and a reproducing case.

Without torch, in one pass over the file, in memory that does not grow with it.
"""

from __future__ import annotations

from fsdp_doctor.explain.cause import Explanation, explain

__all__ = ["Explanation", "explain"]
