"""Renders a merged report as one self-contained HTML file that shows which cases work with which versions.

Imports no torch.
"""

from __future__ import annotations

from fsdp_doctor.report.page.compat_page import render_page, write_page

__all__ = ["render_page", "write_page"]
