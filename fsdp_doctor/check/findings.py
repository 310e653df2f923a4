"""Findings that do not depend on the framework, including findings about the model's dimensions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Use
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.run_context import RunContext, Shards
from fsdp_doctor.matrix.axes import AxisName, AxisValue, Dims, Model, describe_nearest
from fsdp_doctor.matrix.cases import Scenario

# In display order.
FindingKind: TypeAlias = Literal["conflict", "known", "unknown", "note"]
_MAX_UNKNOWN = 20
_MAX_REPLACED = 5
_LARGEST_CONFIG = 1 << 20
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts"),
    "num_local_experts",
)
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """One finding: a sentence, the settings on which it is based, and the ids of cases that demonstrate the problem.

    The kinds ``conflict`` and ``known`` are bad; ``unknown`` means that something was not understood, and ``note`` is a
    hint. ``entry`` is the id of a catalogue entry, for ``known`` only. ``holds_for`` lists the models and framework
    versions to which the finding applies, or is empty if the finding does not depend on models and versions.
    ``decides`` is true if what was not understood may decide how the model is trained.
    """

    kind: FindingKind
    sentence: str
    settings: tuple[str, ...] = ()
    entry: str = ""
    cases: tuple[str, ...] = ()
    holds_for: tuple[str, ...] = ()
    decides: bool = False

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
    """Run of the user's model, which has other dimensions than the matrix's small model."""

    def list_possible_shards(self, scenario: Scenario) -> tuple[Shards, ...]:
        """Returns ``uneven`` if the model is known to shard unevenly.

        Otherwise returns ``even`` if the size of a shard group is a power of two, which divides most dimensions. For
        any other size, returns both.
        """
        group = self.shard_group(scenario)
        if not scenario.dims.is_even:
            return ("uneven",)
        return ("even",) if group & (group - 1) == 0 else ("even", "uneven")


def report_conflict(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _make_finding("conflict", sentence, settings)


def note(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return _make_finding("note", sentence, settings)


def report_unknown(sentence: str, *settings: Setting | None, decides: bool = False) -> ConfigFinding:
    return dataclasses.replace(_make_finding("unknown", sentence, settings), decides=decides)


def report_known(entry: str, *settings: Setting | None) -> ConfigFinding:
    """Makes the finding for a catalogue entry; ``entry`` is its id."""
    failure = catalogue.find_entry(entry)
    finding = _make_finding("known", f"{failure.title} ({failure.verdict})", settings)
    return dataclasses.replace(finding, entry=entry)


def find_unknown_keys(settings: Settings, section: str, known_keys: Sequence[str]) -> list[ConfigFinding]:
    """Reports keys of a section that are not in ``known_keys``; the keys below a known key are not checked."""
    names = {row.key.removeprefix(f"{section}.").partition(".")[0]: row for row in settings.list_below(section)}
    strange = {name: row for name, row in names.items() if name not in known_keys}
    findings = [
        report_unknown(
            f"{name!r} is not a known key of {section}{describe_nearest(name, known_keys)}", row, decides=True
        )
        for name, row in itertools.islice(strange.items(), _MAX_UNKNOWN)
    ]
    if len(strange) > _MAX_UNKNOWN:
        findings.append(report_unknown(f"{len(strange) - _MAX_UNKNOWN} more keys of {section} are not known"))
    return findings


def find_replaced_values(settings: Settings) -> list[ConfigFinding]:
    """Makes one note about all settings that a single file sets to two different values."""
    pairs = list(settings.replaced.values())
    shown = [row for pair in pairs[:_MAX_REPLACED] for row in pair]
    more = f" ({len(pairs) - _MAX_REPLACED} more are not shown)" if len(pairs) > _MAX_REPLACED else ""
    sentence = f"the same file sets a setting twice; the later value is used{more}"
    return [note(sentence, *shown)] if pairs else []


def find_known_failures(uses: Iterable[Use], context: RunContext) -> list[ConfigFinding]:
    """Makes one finding for each catalogue entry that predicts a failure of a case of ``uses`` in this run."""
    findings: dict[str, ConfigFinding] = {}
    for use in uses:
        for case in use.cases:
            for entry in catalogue.list_expected_failures(case, context):
                finding = findings.get(entry.id) or report_known(entry.id)
                findings[entry.id] = dataclasses.replace(
                    finding,
                    cases=tuple(dict.fromkeys((*finding.cases, case.id))),
                    holds_for=tuple(dict.fromkeys((*finding.holds_for, use.title))),
                )
    return list(findings.values())


def find_missing_backends(uses: Sequence[Use]) -> list[ConfigFinding]:
    """Reports FSDP2 models whose offload policy keeps shards on the CPU, if the process group has no CPU backend."""
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
            "accelerator's backend: no backend can run a collective over the shards on the CPU",
            settings=tuple(
                dict.fromkeys(str(r) for use in same for r in use.reasons if r.axis in ("offload", "backend"))
            ),
            cases=tuple(dict.fromkeys(case.id for use in same for case in use.cases)),
            holds_for=tuple(use.title for use in same),
        )
        for role, same in lacking.items()
    ]


def _make_finding(kind: FindingKind, sentence: str, settings: Iterable[Setting | None]) -> ConfigFinding:
    return ConfigFinding(kind=kind, sentence=sentence, settings=tuple(str(row) for row in settings if row))


# The model that a configuration names: which of the matrix's models it is, and whether its shards are uneven


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel:
    """Model that a configuration names, and the number of ranks in one shard group.

    ``path`` is the setting that names the model. A field is None if the configuration does not give its value.
    """

    path: Setting | None = None
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class _LocalModel:
    """Contents of a model's config.json.

    ``sizes`` are the dimensions that FSDP2 shards. ``built_in`` is the matrix's model of the same type, or None.
    """

    sizes: Mapping[str, int]
    model_type: str
    built_in: Model | None


def apply_model(uses: Sequence[Use], model: ConfiguredModel) -> tuple[tuple[Use, ...], list[ConfigFinding]]:
    """Applies the model's type and dimensions to the uses; returns the uses and the resulting findings."""
    scenarios = [use.scenario for use in uses if use.scenario is not None]
    if not scenarios:
        return tuple(uses), []
    local = _read_local_model(model.path)
    if local is None or model.ranks is None:
        return tuple(uses), [_report_unknown_dims(model)] if any(map(_races_where_uneven, uses)) else []
    findings = []
    if local.built_in is None:
        sentence = f"the probe has no model of type {local.model_type!r} and uses {scenarios[0].model} instead"
        findings.append(note(sentence, model.path))
    sizes = ", ".join(f"{name}={size}" for name, size in local.sizes.items() if size % model.ranks)
    where = f"config.json of {model.path}" + (f": {sizes} over {model.ranks} ranks" if sizes else "")
    changed = tuple(use.change(_list_changes(use, local, uneven=bool(sizes)), where) for use in uses)
    racing = [use for use in changed if sizes and _races_where_uneven(use)]
    if racing:
        findings.append(_report_race(racing, sizes, model.ranks))
    return changed, findings


def _read_local_model(path: Setting | None) -> _LocalModel | None:
    """Reads a local model; None if the path is not a directory with a Hugging Face config.json."""
    try:
        file = pathlib.Path(str(path.value) if path else "").expanduser() / "config.json"
        if path is None or not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # pathlib raises RuntimeError for the home of an unknown user.
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    model_type = str(config.get("model_type", ""))
    built_in = next((model for model in Model if _name_type(model) == model_type), None)
    if built_in is Model.QWEN3 and text.get("tie_word_embeddings"):
        built_in = Model.QWEN3_TIED
    return _LocalModel(sizes=_read_sizes(text), model_type=model_type, built_in=built_in)


def _name_type(model: Model) -> str | None:
    """Returns the ``model_type`` of a model of the matrix; None for variants and for the user's own model."""
    match model:
        case Model.QWEN2:
            return "qwen2"
        case Model.QWEN3:
            return "qwen3"
        case Model.QWEN3_MOE:
            return "qwen3_moe"
        case Model.QWEN3_5:
            return "qwen3_5"
        case (
            Model.QWEN3_TIED
            | Model.QWEN3_BUFFERS
            | Model.QWEN3_LORA
            | Model.QWEN3_QLORA
            | Model.QWEN3_QLORA_BF16
            | Model.QWEN3_FLOAT8
            | Model.QWEN3_MXFP8
            | Model.CUSTOM
        ):
            return None
        case _:
            assert_never(model)


def _read_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    values = {name: value for name, value in config.items() if type(value) is int and value > 0}
    sizes = {name: values[name] for name in _SIZES if name in values}
    heads = values.get("num_attention_heads", 0)
    head_dim = values.get("head_dim") or (values.get("hidden_size", 0) // heads if heads else 0)
    for name in _HEADS:
        if count := values.get(name, 0) * head_dim:
            sizes[f"{name} * head_dim"] = count
    return sizes


def _list_changes(use: Use, local: _LocalModel, *, uneven: bool) -> dict[AxisName, AxisValue]:
    changes: dict[AxisName, AxisValue] = {}
    if use.scenario is None:
        return changes
    if uneven:
        changes["dims"] = Dims.UNEVEN
    # A model with an adapter stays qwen3-lora, since the matrix has no other LoRA model.
    if local.built_in is not None and local.built_in is not Model.QWEN3 and use.scenario.model is Model.QWEN3:
        changes["model"] = local.built_in
    return changes


def _races_where_uneven(use: Use) -> bool:
    scenario = use.scenario
    return (
        scenario is not None
        and scenario.version == 2
        and scenario.param_offload
        and not scenario.transfer.is_blocking
        and not scenario.sharding.keeps_whole_tensors
    )


def _report_race(racing: Sequence[Use], sizes: str, ranks: int) -> ConfigFinding:
    sentence = (
        f"the manual offload does not wait for its copies, and {sizes} cannot be divided evenly among the {ranks} "
        "ranks of a shard group. FSDP2 pads an uneven shard on the host while the copy is still running, and "
        "weights are lost"
    )
    settings = tuple(str(reason) for reason in racing[0].reasons if reason.axis in ("offload", "transfer", "dims"))
    ids = tuple(case.id for use in racing for case in use.cases)
    titles = tuple(dict.fromkeys(use.title for use in racing))
    return ConfigFinding(kind="conflict", sentence=sentence, settings=settings, cases=ids, holds_for=titles)


def _report_unknown_dims(model: ConfiguredModel) -> ConfigFinding:
    if model.ranks is None:
        missing = "the configuration does not say how many ranks there are; give --world-size"
    elif model.path is None:
        missing = "the configuration does not name a model"
    else:
        missing = "the model is not a local directory"
    sentence = (
        "the manual offload does not wait for its copies, which loses weights if a dimension cannot be divided "
        "evenly among the ranks of a shard group. It is not known whether this model has such a dimension: "
        f"{missing}"
    )
    return note(sentence, model.path)
