"""Settings of verl that contradict one another, that nothing reads, or that do harm together."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence

from fsdp_doctor.check.findings import ConfigFinding, conflict, known, note, unknown
from fsdp_doctor.check.frameworks.framework import get_if_true
from fsdp_doctor.check.frameworks.verl.models import MODELS, VerlModel, VerlVersions, names_engine
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.matrix.axes import Strategy

_OFFLOADS = ("offload_policy", "param_offload", "optimizer_offload")
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
# The dtypes that verl's PrecisionType makes of other names.
_DTYPES = {"fp16": "float16", "16": "float16", "bf16": "bfloat16", "fp32": "float32", "32": "float32"}
_ROOTS = ("actor_rollout_ref", "critic", "engine")


def find_offload_conflicts(model: VerlModel, strategy: Strategy | None, settings: Settings) -> Iterator[ConfigFinding]:
    """Conflicts between the strategy and the offloads. strategy: None for an engine other than FSDP1 and FSDP2."""
    policy = model.policy_setting(settings)
    if model.old_sft:
        if policy and strategy == "fsdp2":
            sentence = (
                "since v0.4 the SFT trainer hands FSDP2 what is FSDP1's offload, which leaves the shards on the CPU"
            )
            yield conflict(sentence, policy, model.strategy_setting(settings))
        return
    inner, outer = model.inner_strategy(settings), model.outer_strategy(settings)
    if inner and outer and inner.value != outer.value and inner.key != outer.key:
        sentence = (
            f"{model.role}: two different strategies: since PR 5885 (v0.8.0) the engine follows the first, before that "
            "the second"
        )
        yield conflict(sentence, outer, inner)
    manual = list(model.manual_offloads(settings).values())
    if model.forward_only:
        if policy or manual:
            sentence = f"{model.role}: verl puts this model under the policy, whatever these settings say"
            yield note(sentence, policy, *manual)
    elif policy and strategy == "fsdp1":
        sentence = f"{model.role}: offload_policy has no effect with FSDP1; only strategy=fsdp2 reads it"
        yield conflict(sentence, policy, model.strategy_setting(settings))
    elif policy and strategy == "fsdp2" and manual:
        sentence = f"{model.role}: the policy and a manual offload are both on; the policy takes precedence"
        yield conflict(sentence, policy, *manual)
    if strategy == "fsdp2" and settings.flag(*model.keys("use_orig_params")):
        sentence = f"{model.role}: FSDP2 does not read use_orig_params"
        yield note(sentence, settings.first(*model.keys("use_orig_params")))


def find_ignored_strategy(
    model: VerlModel, settings: Settings, versions: Sequence[VerlVersions]
) -> Iterator[ConfigFinding]:
    """The strategy in the model's section is ``fsdp`` by default, and until PR 5885 the engine followed no other."""
    outer = model.outer_strategy(settings)
    if not any(item.own_strategy for item in versions) or model.inner_strategy(settings):
        return
    if outer and outer.value != "fsdp":
        sentence = (
            f"{model.role}: an engine before PR 5885, as in v0.7.1, uses FSDP1 unless fsdp_config.strategy is set"
        )
        yield note(sentence, outer)


def find_double_load(model: VerlModel, settings: Settings, versions: Sequence[VerlVersions]) -> Iterator[ConfigFinding]:
    """A worker that only generates has the FSDP model beside the engine's own weights (issue 4229)."""
    legacy = tuple(f"{model.role}, {item.label}" for item in versions if not item.engine)
    rows = settings.below("async_training")
    if not (model.synced and legacy and rows) or settings.number(*model.keys("fsdp_size")) != 1:
        return
    if settings.flag(*model.keys("param_offload")):
        return
    share = settings.first(_UTILIZATION)
    memory = f"{share.value} of the device's memory" if share else "its share of the device's memory"
    sentence = (
        f"{model.role}: a worker that only generates loads this FSDP model, too, and with fsdp_size=1 all of it: it is "
        f"beside the engine's own weights when the engine asks for {memory} (issue 4229); "
        "`fsdp-doctor memory rollout` shows it"
    )
    finding = conflict(sentence, settings.first(*model.keys("fsdp_size")), share, rows[0])
    yield dataclasses.replace(finding, holds_for=legacy)


def find_useless_offload(
    model: VerlModel, strategy: Strategy | None, settings: Settings, world_size: int | None
) -> Iterator[ConfigFinding]:
    """An offload of FSDP1 parameters that are not sharded, in the dtype of the computation (by default float32)."""
    moved = get_if_true(settings, *model.keys("param_offload"))
    if strategy != "fsdp1" or moved is None or model.forward_only or model.old_sft:
        return
    if model.table.configured_model(settings, world_size).ranks != 1 or settings.flag(*model.keys("use_orig_params")):
        return
    stored = settings.first(*model.keys("model_dtype"))
    computed = settings.first(*model.keys("mixed_precision.param_dtype"), *model.keys("dtype"))
    if _read_dtype(stored, "float32") == _read_dtype(computed, "bfloat16"):
        size = settings.first(*model.keys("fsdp_size"))
        yield known("fsdp1-no-shard-offload-frees-nothing", moved, size, stored, computed)


def find_misplaced_offloads(settings: Settings) -> Iterator[ConfigFinding]:
    """Offloads in a section where verl's FSDP does not read them."""
    sections = [section for model in MODELS for section in model.sections]
    for row in settings:
        section = row.key.rpartition(".")[0]
        if row.name not in _OFFLOADS or section in sections or names_engine(section):
            continue
        if section.startswith(_ROOTS):
            (near,) = difflib.get_close_matches(section, sections, n=1, cutoff=0)
            sentence = f"verl's FSDP does not read {row.name} in {section} (did you mean {near}.{row.name}?)"
            yield unknown(sentence, row)


def _read_dtype(row: Setting | None, default: str) -> str:
    word = str(row.value) if row else default
    return _DTYPES.get(word, word)
