"""What a check finds, name by name, summed up as problems."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_doctor.errors import some
from fsdp_doctor.verdict.records import Problem, ProblemKind

_SHOWN = 3


class Findings:
    """Takes notes; in the order in which they came, one problem for each kind, with the first names of each finding."""

    def __init__(self) -> None:
        self._found: dict[ProblemKind, dict[str, list[str]]] = {}

    def note(self, kind: ProblemKind, what: str, name: str) -> None:
        self._found.setdefault(kind, {}).setdefault(what, []).append(name)

    def problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(kind=kind, detail="; ".join(f"{what}: {first_names(names)}" for what, names in findings.items()))
            for kind, findings in self._found.items()
        )


def first_names(names: Collection[str]) -> str:
    return some(names, _SHOWN)
