"""What is found in a configuration, and the findings that every framework can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Use
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.axes import nearest

# In the order in which they are shown.
ConfigFindingKind: TypeAlias = Literal["conflict", "known", "unknown", "note"]


@dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """One sentence, the settings that it rests on, and the cases that show it.

    ``conflict`` and ``known`` are bad; ``unknown`` says what was not understood, ``note`` what to bear in mind.
    entry: the id of the catalogue's entry, for ``known`` alone.
    """

    kind: ConfigFindingKind
    sentence: str
    settings: tuple[str, ...] = ()
    entry: str = ""
    cases: tuple[str, ...] = ()

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


def unknown_keys(settings: Settings, section: str, known_keys: Sequence[str]) -> list[ConfigFinding]:
    """The keys of a section that are not in ``known_keys``; a known key may have anything below it."""
    found = []
    for row in settings.below(section):
        name = row.key.removeprefix(f"{section}.").partition(".")[0]
        if name not in known_keys:
            found.append(unknown(f"{name!r} is not a known key of {section}{nearest(name, known_keys)}", row))
    return found


def known_failures(uses: Iterable[Use]) -> list[ConfigFinding]:
    """One finding for each entry of the catalogue that a case of the uses triggers."""
    titles: dict[str, str] = {}
    cases: dict[str, list[str]] = {}
    for case in dict.fromkeys(case for use in uses for case in use.cases):
        for entry in catalogue.of_case(case, RunContext()):
            titles[entry.id] = f"{entry.title} ({entry.verdict})"
            cases.setdefault(entry.id, []).append(case.id)
    return [
        ConfigFinding(kind="known", sentence=title, entry=entry, cases=tuple(cases[entry]))
        for entry, title in titles.items()
    ]


def missing_backends(uses: Sequence[Use]) -> list[ConfigFinding]:
    """FSDP2 under a policy leaves its shards on the CPU, which the accelerator's backend cannot gather or reduce."""
    hit = [use for use in uses if _lacks_cpu_backend(use)]
    found = []
    for role in dict.fromkeys(use.role for use in hit):
        mine = [use for use in hit if use.role == role]
        versions = "; ".join(use.versions for use in mine)
        title = role if len(mine) == len([use for use in uses if use.role == role]) else f"{role}, {versions}"
        sentence = (
            f"{title}: the policy keeps the shards on the CPU, but the process group has only the accelerator's "
            "backend: no backend can run a collective over them there"
        )
        reasons = [reason for use in mine for reason in use.reasons if reason.axis in ("offload", "backend")]
        ids = tuple(dict.fromkeys(case.id for use in mine for case in use.cases))
        settings = tuple(dict.fromkeys(map(str, reasons)))
        found.append(ConfigFinding(kind="conflict", sentence=sentence, settings=settings, cases=ids))
    return found


def _lacks_cpu_backend(use: Use) -> bool:
    scenario = use.scenario
    return (
        scenario is not None and scenario.strategy == "fsdp2" and scenario.policy and scenario.backend == "device-only"
    )


def _of_settings(kind: ConfigFindingKind, sentence: str, settings: Iterable[Setting | None]) -> ConfigFinding:
    return ConfigFinding(kind=kind, sentence=sentence, settings=tuple(str(row) for row in settings if row))
