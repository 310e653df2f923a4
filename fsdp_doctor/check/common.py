"""Findings that no framework is alone with: what the catalogue knows, backends, uneven shards, unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_doctor.check.dims import dims_of
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import ConfigFinding, ExtractionPoint, Reason, Use, note
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import Case


def known(uses: Sequence[Use]) -> list[ConfigFinding]:
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


def backends(uses: Sequence[Use]) -> list[ConfigFinding]:
    """FSDP2 under a policy leaves its shards on the CPU, which the accelerator's backend cannot gather or reduce."""
    hit = [use for use in uses if use.scenario and use.scenario.version == 2 and use.scenario.policy]
    hit = [use for use in hit if use.scenario and use.scenario.backend == "device-only"]
    found = []
    for role in dict.fromkeys(use.role for use in hit):
        mine = [use for use in hit if use.role == role]
        versions = "; ".join(use.versions for use in mine)
        title = role if len(mine) == len([use for use in uses if use.role == role]) else f"{role}, {versions}"
        rows = [reason for use in mine for reason in use.reasons if reason.axis in ("offload", "backend")]
        sentence = (
            f"{title}: the policy keeps shards on the CPU, and the process group has the accelerator's backend alone: "
            "a collective over shards where they lie has no backend"
        )
        ids = tuple(dict.fromkeys(case.id for use in mine for case in use.cases))
        settings = tuple(dict.fromkeys(map(str, rows)))
        found.append(ConfigFinding(kind="conflict", sentence=sentence, settings=settings, cases=ids))
    return found


@dataclass(frozen=True, kw_only=True)
class Model:
    """Where the configuration says that the model is, and over how many ranks it is sharded."""

    path: Setting | None
    ranks: int | None


def with_dims(uses: Sequence[Use], model: Model) -> tuple[tuple[Use, ...], list[ConfigFinding]]:
    """The uses with the model and dims of the directory, and what follows; what cannot be known is said once."""
    scenarios = [use.scenario for use in uses if use.scenario is not None]
    if not scenarios:
        return tuple(uses), []
    dims = dims_of(str(model.path.value)) if model.path else None
    if dims is None or model.ranks is None:
        return tuple(uses), [_cannot_know(model)] if any(map(_races_where_uneven, uses)) else []
    found: list[ConfigFinding] = []
    if dims.built_in is None:
        stands = scenarios[0].model
        found.append(note(f"the matrix has no model of type {dims.model_type!r}; {stands} stands for it", model.path))
    sizes = ", ".join(f"{name}={size}" for name, size in dims.uneven(model.ranks).items())
    changed = tuple(_with_model(use, dims.built_in, sizes, model) for use in uses)
    racing = [use for use in changed if sizes and _races_where_uneven(use)]
    if racing:
        sentence = (
            f"the manual offload does not wait for its copies, and {sizes} do not divide by the {model.ranks} ranks of "
            "a shard group: FSDP2 pads such a shard on the host while the copy is under way, and weights are lost"
        )
        rows = tuple(str(reason) for reason in racing[0].reasons if reason.axis in ("offload", "transfer", "dims"))
        ids = tuple(case.id for use in racing for case in use.cases)
        found.append(ConfigFinding(kind="conflict", sentence=sentence, settings=rows, cases=ids))
    return changed, found


def unknown_keys(settings: Settings, section: str, known_keys: Iterable[str]) -> list[ConfigFinding]:
    """The keys of a section that are not in ``known_keys``; a known key may have anything below it."""
    names = list(known_keys)
    found = []
    for row in settings.below(section):
        name = row.key.removeprefix(f"{section}.").partition(".")[0]
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=3)
        near = f" (near it: {', '.join(close)})" if close else ""
        found.append(
            ConfigFinding(
                kind="unknown", sentence=f"{section} has no key {name!r} that is known here{near}", settings=(str(row),)
            )
        )
    return found


def unreadable(role: str, error: Unreadable) -> tuple[Use, ConfigFinding]:
    """A role that nothing is said of, because a setting which decides it cannot be read."""
    return Use(role=role, why_not="cannot be said"), ConfigFinding(kind="unknown", sentence=f"{role}: {error}")


def _races_where_uneven(use: Use) -> bool:
    scenario = use.scenario
    return (
        scenario is not None
        and scenario.version == 2
        and scenario.param_offload
        and scenario.transfer == "nonblocking"
        and scenario.sharding != "size1"
    )


def _cannot_know(model: Model) -> ConfigFinding:
    if model.ranks is None:
        missing = "the number of ranks is not in the configuration; give --world-size"
    elif model.path is None:
        missing = "the configuration names no model"
    else:
        missing = "the model is no directory here"
    return note(
        "the manual offload does not wait for its copies, which loses weights where a dimension does not divide by the "
        f"shard group; whether one does cannot be said: {missing}",
        model.path,
    )


def _with_model(use: Use, built_in: str | None, sizes: str, model: Model) -> Use:
    scenario = use.scenario
    if scenario is None:
        return use
    changes = {"dims": "uneven"} if sizes else {}
    if built_in is not None and scenario.model == "qwen3":
        changes["model"] = built_in
    changes = {axis: value for axis, value in changes.items() if getattr(scenario, axis) != value}
    where = f"config.json of {model.path}" + (f": {sizes} over {model.ranks} ranks" if sizes else "")
    return dataclasses.replace(
        use,
        scenario=scenario.changed(**changes),
        reasons=(*use.reasons, *(Reason(axis=axis, value=value, because=where) for axis, value in changes.items())),
        extractions=tuple(
            ExtractionPoint(
                purpose=extraction.purpose,
                case=Case(extraction.case.scenario.changed(**changes), extraction.case.path),
            )
            for extraction in use.extractions
        ),
    )
