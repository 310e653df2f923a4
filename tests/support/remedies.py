"""The cases and tests that, according to the catalogue, ran its remedies."""

from __future__ import annotations

from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.known.failures import NOT_RUN


def list_remedy_runs() -> list[str]:
    """Lists the ids of cases and the tests (``FILE::NAME``) that ran a remedy, or its form for users of a framework."""
    runs = {run for entry in read_catalogue() for run in (entry.remedy_run, *entry.remedies_run.values())}
    return sorted(runs - {NOT_RUN})
