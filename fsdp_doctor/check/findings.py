"""Findings in a configuration, and those that every framework can have."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Use
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.run_context import RunContext, Shards
from fsdp_doctor.matrix.axes import nearest
from fsdp_doctor.matrix.cases import Scenario

# In the order in which they are shown.
FindingKind: TypeAlias = Literal["conflict", "known", "unknown", "note"]
_MAX_UNKNOWN = 20
_MAX_REPLACED = 5


@dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """One sentence, the settings that it rests on, and the cases that show it.

    ``conflict`` and ``known`` are bad; ``unknown`` says what was not understood, ``note`` what to bear in mind.
    entry: the id of the catalogue's entry, for ``known`` alone. cases: their ids. holds_for: the models, each with the
    versions of the framework, that have it; empty for what does not depend on them.
    """

    kind: FindingKind
    sentence: str
    settings: tuple[str, ...] = ()
    entry: str = ""
    cases: tuple[str, ...] = ()
    holds_for: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        match self.kind:
            case "conflict" | "known":
                return True
            case "unknown" | "note":
                return False
            case _:
                assert_never(self.kind)


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun(RunContext):
    """A run of the user's own model, whose dimensions are not those of the matrix's small one."""

    def possible_shards(self, scenario: Scenario) -> tuple[Shards, ...]:
        """Uneven where the model is known to be; else both, unless the ranks are a power of two, as most dimensions."""
        group = self.shard_group(scenario)
        if not scenario.dims.is_even:
            return ("uneven",)
        return ("even",) if group & (group - 1) == 0 else ("even", "uneven")


def conflict(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _finding("conflict", sentence, settings)


def note(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _finding("note", sentence, settings)


def unknown(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _finding("unknown", sentence, settings)


def known(entry: str, *settings: Setting | None) -> ConfigFinding:
    """An entry of the catalogue that settings trigger and no case of the matrix shows."""
    failure = catalogue.known_failure(entry)
    finding = _finding("known", f"{failure.title} ({failure.verdict})", settings)
    return dataclasses.replace(finding, entry=entry)


def find_unknown_keys(settings: Settings, section: str, known_keys: Sequence[str]) -> list[ConfigFinding]:
    """The keys of a section that are not in ``known_keys``; a known key may have anything below it."""
    names = {row.key.removeprefix(f"{section}.").partition(".")[0]: row for row in settings.below(section)}
    strange = {name: row for name, row in names.items() if name not in known_keys}
    findings = [
        unknown(f"{name!r} is not a known key of {section}{nearest(name, known_keys)}", row)
        for name, row in itertools.islice(strange.items(), _MAX_UNKNOWN)
    ]
    if len(strange) > _MAX_UNKNOWN:
        findings.append(unknown(f"{len(strange) - _MAX_UNKNOWN} more keys of {section} are not known"))
    return findings


def find_replaced_values(settings: Settings) -> list[ConfigFinding]:
    """One note on the settings to which one file gives two values."""
    pairs = list(settings.replaced.values())
    shown = [row for pair in pairs[:_MAX_REPLACED] for row in (pair.earlier, pair.later)]
    more = f" ({len(pairs) - _MAX_REPLACED} more are not shown)" if len(pairs) > _MAX_REPLACED else ""
    sentence = f"the same file gives a setting two values; the later one of each is taken{more}"
    return [note(sentence, *shown)] if pairs else []


def find_known_failures(uses: Iterable[Use], context: RunContext) -> list[ConfigFinding]:
    """One finding for each entry of the catalogue that a case of the uses triggers in such a run."""
    findings: dict[str, ConfigFinding] = {}
    for use in uses:
        for case in use.cases:
            for entry in catalogue.expected_failures(case, context):
                finding = findings.get(entry.id) or known(entry.id)
                findings[entry.id] = dataclasses.replace(
                    finding,
                    cases=tuple(dict.fromkeys((*finding.cases, case.id))),
                    holds_for=tuple(dict.fromkeys((*finding.holds_for, use.title))),
                )
    return list(findings.values())


def find_missing_backends(uses: Sequence[Use]) -> list[ConfigFinding]:
    """FSDP2 under a policy leaves its shards on the CPU, which the accelerator's backend cannot gather or reduce."""
    lacking: dict[str, list[Use]] = {}
    for use in uses:
        scenario = use.scenario
        if scenario is None or not (scenario.version == 2 and scenario.policy):
            continue
        if not scenario.backend.has_cpu_collectives:
            lacking.setdefault(use.role, []).append(use)
    return [
        ConfigFinding(
            kind="conflict",
            sentence=f"{role}: the policy keeps the shards on the CPU, but the process group has only the "
            "accelerator's backend: no backend can run a collective over them there",
            settings=tuple(
                dict.fromkeys(str(r) for use in same for r in use.reasons if r.axis in ("offload", "backend"))
            ),
            cases=tuple(dict.fromkeys(case.id for use in same for case in use.cases)),
            holds_for=tuple(use.title for use in same),
        )
        for role, same in lacking.items()
    ]


def _finding(kind: FindingKind, sentence: str, settings: Iterable[Setting | None]) -> ConfigFinding:
    return ConfigFinding(kind=kind, sentence=sentence, settings=tuple(str(row) for row in settings if row))
