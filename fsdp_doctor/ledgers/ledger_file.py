"""Ledgers as JSON, written and read back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.ledgers.stage_ledger import DeviceLedger, HostLedger, StageLedger

SCHEMA = "fsdp-doctor/ledgers"
SCHEMA_VERSION = 1
Origin: TypeAlias = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class LedgerFile:
    """The ledgers of one run or one plan.

    command: that made them. device: its kind, and how many ranks: ``2 x NVIDIA H200``.
    packages: the versions of what ran. notes: what is to be known beside, a sentence each.
    estimates: by job, what other estimators say of it, in bytes by their own words.
    """

    origin: Origin
    command: str
    device: str
    ledgers: tuple[StageLedger, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    estimates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def ledgers_to_json(file: LedgerFile) -> str:
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "version": __version__}
    return json.dumps(head | dataclasses.asdict(file), indent=1) + "\n"


def ledgers_from_json(text: str) -> LedgerFile:
    """Raises UsageError for what is no file of ledgers."""
    try:
        data: dict[str, Any] = json.loads(text)
        if (data.pop("schema"), data.pop("schema_version")) != (SCHEMA, SCHEMA_VERSION):
            raise KeyError("schema")
        data.pop("version")
        notes, ledgers = tuple(data.pop("notes")), tuple(map(ledger_from_dict, data.pop("ledgers")))
        return LedgerFile(**data, notes=notes, ledgers=ledgers)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"this is no file of ledgers: {type(error).__name__}: {error}") from None


def ledger_from_dict(data: Mapping[str, Any]) -> StageLedger:
    """Of what ``dataclasses.asdict`` makes of one. Raises KeyError or TypeError for what is none."""
    device = data["device"]
    fields = {**data, "host": HostLedger(**data["host"]), "device": DeviceLedger(**device) if device else None}
    return StageLedger(**fields)
