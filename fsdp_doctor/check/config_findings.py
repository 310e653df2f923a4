"""What is found in a configuration, and the findings that every framework can have."""

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
ConfigFindingKind: TypeAlias = Literal["conflict", "known", "unknown", "note"]


_MOST_UNKNOWN = 20
_MOST_TWICE = 5


@dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """One sentence, the settings that it rests on, and the cases that show it.

    ``conflict`` and ``known`` are bad; ``unknown`` says what was not understood, ``note`` what to bear in mind.
    entry: the id of the catalogue's entry, for ``known`` alone. cases: their ids. holds_for: the models, each with the
    versions of the framework, that have it; empty for what does not depend on them.
    """

    kind: ConfigFindingKind
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


def conflict(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _of_settings("conflict", sentence, settings)


def note(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _of_settings("note", sentence, settings)


def unknown(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _of_settings("unknown", sentence, settings)


def known(entry: str, *settings: Setting | None) -> ConfigFinding:
    """What an entry of the catalogue says of settings, where it shows in no case: nothing is wrong with a value."""
    of = catalogue.known_failure(entry)
    found = _of_settings("known", f"{of.title} ({of.verdict})", settings)
    return dataclasses.replace(found, entry=entry)


def unknown_keys(settings: Settings, section: str, known_keys: Sequence[str]) -> list[ConfigFinding]:
    """The keys of a section that are not in ``known_keys``; a known key may have anything below it."""
    names = {row.key.removeprefix(f"{section}.").partition(".")[0]: row for row in settings.below(section)}
    strange = {name: row for name, row in names.items() if name not in known_keys}
    found = [
        unknown(f"{name!r} is not a known key of {section}{nearest(name, known_keys)}", row)
        for name, row in itertools.islice(strange.items(), _MOST_UNKNOWN)
    ]
    if len(strange) > _MOST_UNKNOWN:
        found.append(unknown(f"{len(strange) - _MOST_UNKNOWN} more keys of {section} are not known"))
    return found


def written_twice(settings: Settings) -> list[ConfigFinding]:
    """Settings that one file gives two values; the later was taken."""
    twice = list(settings.replaced.values())
    shown = [row for pair in twice[:_MOST_TWICE] for row in (pair.earlier, pair.later)]
    more = f" ({len(twice) - _MOST_TWICE} more are not shown)" if len(twice) > _MOST_TWICE else ""
    sentence = f"the same file gives a setting two values; the later one of each is taken{more}"
    return [note(sentence, *shown)] if twice else []


def known_failures(uses: Iterable[Use], context: RunContext) -> list[ConfigFinding]:
    """One finding for each entry of the catalogue that a case of the uses triggers in such a run."""
    found: dict[str, ConfigFinding] = {}
    for use in uses:
        for case in use.cases:
            for entry in catalogue.of_case(case, context):
                known = found.setdefault(
                    entry.id, ConfigFinding(kind="known", sentence=f"{entry.title} ({entry.verdict})", entry=entry.id)
                )
                found[entry.id] = dataclasses.replace(
                    known,
                    cases=tuple(dict.fromkeys((*known.cases, case.id))),
                    holds_for=tuple(dict.fromkeys((*known.holds_for, use.title))),
                )
    return list(found.values())


def missing_backends(uses: Sequence[Use]) -> list[ConfigFinding]:
    """FSDP2 under a policy leaves its shards on the CPU, which the accelerator's backend cannot gather or reduce."""
    hit = [use for use in uses if _lacks_cpu_backend(use)]
    found = []
    for role in dict.fromkeys(use.role for use in hit):
        mine = [use for use in hit if use.role == role]
        sentence = (
            f"{role}: the policy keeps the shards on the CPU, but the process group has only the accelerator's "
            "backend: no backend can run a collective over them there"
        )
        reasons = [reason for use in mine for reason in use.reasons if reason.axis in ("offload", "backend")]
        found.append(
            ConfigFinding(
                kind="conflict",
                sentence=sentence,
                settings=tuple(dict.fromkeys(map(str, reasons))),
                cases=tuple(dict.fromkeys(case.id for use in mine for case in use.cases)),
                holds_for=tuple(use.title for use in mine),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun(RunContext):
    """A run of the user's own model, whose dimensions are not those of the matrix's small one."""

    def possible_shards(self, scenario: Scenario) -> tuple[Shards, ...]:
        """Uneven where the model is known to be; else both, unless the ranks are a power of two, as most dimensions."""
        group = self.shard_group(scenario)
        if scenario.dims == "uneven":
            return ("uneven",)
        return ("even",) if group & (group - 1) == 0 else ("even", "uneven")


def _lacks_cpu_backend(use: Use) -> bool:
    scenario = use.scenario
    return (
        scenario is not None and scenario.strategy == "fsdp2" and scenario.policy and scenario.backend == "device-only"
    )


def _of_settings(kind: ConfigFindingKind, sentence: str, settings: Iterable[Setting | None]) -> ConfigFinding:
    return ConfigFinding(kind=kind, sentence=sentence, settings=tuple(str(row) for row in settings if row))
