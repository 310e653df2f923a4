"""One finding, and the words for how many tensors it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.report.layout import counted

Severity = Literal["bad", "hazard", "note"]
_SHOWN_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is to be known of the model.

    names: of the tensors that it is about. entry: the id of the catalogue's entry, empty where it has none.
    """

    kind: str
    severity: Severity
    sentence: str
    names: tuple[str, ...] = field(default=(), repr=False)
    entry: str = ""
    remedy: str = ""

    @property
    def bad(self) -> bool:
        return self.severity == "bad"


def few(names: Sequence[str], noun: str = "parameter") -> str:
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    return f"{counted(len(names), noun)} ({shown})"
