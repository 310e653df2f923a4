"""A merged report as one HTML file that needs nothing else: which cases work with which versions. No torch."""

from __future__ import annotations

from fsdp_doctor.report.page.compat_page import render_page, write_page

__all__ = ["render_page", "write_page"]
