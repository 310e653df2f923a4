"""Settings of verl that contradict one another, or that nothing reads."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence

from fsdp_doctor.check.config_findings import ConfigFinding, conflict, known, note, unknown
from fsdp_doctor.check.frameworks.verl.releases import VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import MODELS, OLD_SFT, OTHER_ENGINES, VerlModel
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.matrix.axes import Strategy

_OFFLOADS = ("offload_policy", "param_offload", "optimizer_offload")
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
# What verl's PrecisionType takes each for.
_DTYPES = {"fp16": "float16", "16": "float16", "bf16": "bfloat16", "fp32": "float32", "32": "float32"}
_ROOTS = ("actor_rollout_ref", "critic", "engine")


def of_model(model: VerlModel, strategy: Strategy | None, settings: Settings) -> Iterator[ConfigFinding]:
    """strategy: None for an engine other than FSDP1 and FSDP2."""
    if model is OLD_SFT:
        policy = model.under_policy(settings)
        if policy and strategy == "fsdp2":
            sentence = (
                "since v0.4 the SFT trainer hands FSDP2 what is FSDP1's offload, which leaves the shards on the CPU"
            )
            yield conflict(sentence, policy, model.strategy_row(settings))
        return
    yield from _two_strategies(model, settings)
    on = {name: settings.first(*model.keys(name)) for name in _OFFLOADS if settings.flag(*model.keys(name))}
    policy = on.get("offload_policy")
    manual = [row for name, row in on.items() if name != "offload_policy"]
    if model.forward_only:
        if on:
            sentence = f"{model.role}: verl puts this model under the policy, whatever these settings say"
            yield note(sentence, *on.values())
    elif policy and strategy == "fsdp1":
        sentence = f"{model.role}: offload_policy has no effect with FSDP1; only strategy=fsdp2 reads it"
        yield conflict(sentence, policy, model.strategy_row(settings))
    elif policy and strategy == "fsdp2" and manual:
        sentence = f"{model.role}: the policy and a manual offload are both on; the policy takes precedence"
        yield conflict(sentence, policy, *manual)
    if strategy == "fsdp2" and settings.flag(*model.keys("use_orig_params")):
        sentence = f"{model.role}: FSDP2 does not read use_orig_params"
        yield note(sentence, settings.first(*model.keys("use_orig_params")))


def own_strategy_not_set(model: VerlModel, settings: Settings) -> list[ConfigFinding]:
    """The engine's own setting is ``fsdp`` by default, and until PR 5885 it followed no other."""
    outer = model.outer_strategy(settings)
    if model.inner_strategy(settings) or not outer or outer.value == "fsdp":
        return []
    sentence = f"{model.role}: an engine before PR 5885, as in v0.7.1, uses FSDP1 unless fsdp_config.strategy is set"
    return [note(sentence, outer)]


def loaded_twice(model: VerlModel, settings: Settings, versions: Sequence[VerlVersions]) -> list[ConfigFinding]:
    """A worker that only generates has the FSDP model beside the engine's own weights (issue 4229)."""
    legacy = tuple(f"{model.role}, {one.label}" for one in versions if not one.engine)
    rows = settings.below("async_training")
    size, share = settings.first(*model.keys("fsdp_size")), settings.first(_UTILIZATION)
    offloaded = settings.flag(*model.keys("param_offload"))
    if not (model.synced and legacy and rows) or settings.number(*model.keys("fsdp_size")) != 1 or offloaded:
        return []
    asked = f"{share.value} of the device's memory" if share else "its share of the device's memory"
    sentence = (
        f"{model.role}: a worker that only generates loads this FSDP model, too, and with fsdp_size=1 all of it: it is "
        f"beside the engine's own weights when the engine asks for {asked} (issue 4229); "
        "`fsdp-doctor memory rollout` shows it"
    )
    return [dataclasses.replace(conflict(sentence, size, share, rows[0]), holds_for=legacy)]


def offload_frees_nothing(
    model: VerlModel, strategy: Strategy | None, settings: Settings, world_size: int | None
) -> list[ConfigFinding]:
    """Of FSDP1's parameters in the dtype that is computed in, in shard groups of one; where none is set, float32."""
    on = [settings.first(*model.keys(name)) for name in ("param_offload", "fsdp_size", "model_dtype")]
    moves = settings.flag(*model.keys("param_offload")) and not (model.forward_only or model is OLD_SFT)
    whole = model.table.configured_model(settings, world_size).ranks == 1
    if strategy != "fsdp1" or not (moves and whole) or settings.flag(*model.keys("use_orig_params")):
        return []
    held = _dtype(settings.first(*model.keys("model_dtype")), "float32")
    computed = settings.first(*model.keys("mixed_precision.param_dtype"), *model.keys("dtype"))
    same = held == _dtype(computed, "bfloat16")
    return [known("fsdp1-no-shard-offload-frees-nothing", *on, computed)] if same else []


def misplaced(settings: Settings) -> list[ConfigFinding]:
    """An offload asked for where verl's FSDP does not read it."""
    sections = [section for model in MODELS for section in model.sections]
    found = []
    for row in settings:
        section, _, name = row.key.rpartition(".")
        other = any(word in section for word in OTHER_ENGINES)
        if name in _OFFLOADS and section not in sections and not other and section.startswith(_ROOTS):
            near = difflib.get_close_matches(section, sections, n=1, cutoff=0)
            found.append(
                unknown(f"verl's FSDP does not read {name} in {section} (did you mean {near[0]}.{name}?)", row)
            )
    return found


def _dtype(row: Setting | None, default: str) -> str:
    word = str(row.value) if row else default
    return _DTYPES.get(word, word)


def _two_strategies(model: VerlModel, settings: Settings) -> Iterator[ConfigFinding]:
    inner, outer = model.inner_strategy(settings), model.outer_strategy(settings)
    if inner and outer and inner.value != outer.value and inner.key != outer.key:
        sentence = (
            f"{model.role}: two different strategies: since PR 5885 (v0.8.0) the engine follows the first, before that "
            "the second"
        )
        yield conflict(sentence, outer, inner)
