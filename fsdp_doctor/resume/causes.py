"""Reads the known causes of a wrong resume from ``causes.toml``, and selects the possible causes of a symptom."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Collection
from typing import Literal

import msgspec

from fsdp_doctor.resume.comparison import ResumeSymptom

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE = pathlib.Path(__file__).with_name("causes.toml")


class ResumeCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known cause of a wrong resume. The comment at the top of ``causes.toml`` explains the fields."""

    id: str
    symptoms: list[ResumeSymptom]
    title: str
    remedy: str
    references: list[str]
    frameworks: list[str] = []
    ranks: Literal["", "some"] = ""
    resume: int = 0
    known: str = ""

    @property
    def conditions(self) -> int:
        return bool(self.frameworks) + bool(self.ranks) + bool(self.resume)


@functools.cache
def read_causes() -> tuple[ResumeCause, ...]:
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["cause"]
    return tuple(msgspec.convert(rows, list[ResumeCause]))


def list_causes(
    symptom: ResumeSymptom, *, some_ranks: bool, resume: int, frameworks: Collection[str]
) -> list[ResumeCause]:
    """Lists the possible causes of a symptom, the most likely first.

    some_ranks: whether the symptom is on some ranks but not on all.
    """
    fitting = [
        cause
        for cause in read_causes()
        if symptom in cause.symptoms
        and (not cause.frameworks or {*cause.frameworks} & {*frameworks})
        and (some_ranks or not cause.ranks)
        and cause.resume in (0, resume)
    ]
    return sorted(fitting, key=lambda cause: -cause.conditions)
