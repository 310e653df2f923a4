"""accelerate: ``fsdp_config`` of its YAML, versions 1 and 2, as `accelerate launch` reads it.

Read in accelerate at 1.15.0.dev: commands/launch.py and utils/launch.py for what absent keys mean,
utils/dataclasses.py (FullyShardedDataParallelPlugin) for what a version ignores or refuses, state.py for the
backend (gloo beside NCCL since 1.7.0, PR 3574), Accelerator.get_state_dict and utils/fsdp_utils.py for what is read.
TRL's sync to vLLM, where ``use_vllm`` is beside it, in trl/generation/vllm_generation.py.
"""

from __future__ import annotations

from fsdp_doctor.check import common
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import (
    ConfigFinding,
    ExtractionPoint,
    Given,
    Reading,
    Reason,
    Use,
    because,
    conflict,
    merged,
)
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Backend, Sharding, Strategy
from fsdp_doctor.matrix.cases import Case, Scenario

NAME = "accelerate"
KNOWN_BY = "distributed_type, compute_environment or fsdp_config.fsdp_*"

SECTION = "fsdp_config"
VERSION_1_ONLY = ("sharding_strategy", "use_orig_params", "backward_prefetch", "forward_prefetch", "sync_module_states")
KEYS = (
    *VERSION_1_ONLY,
    *("version", "offload_params", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
    *("min_num_params", "state_dict_type", "cpu_ram_efficient_loading", "activation_checkpointing", "ignored_modules"),
    "backward_prefetch_policy",
)
_MIXED_SINCE = (1, 7)


def recognises(settings: Settings) -> bool:
    fragment = any(row.key.startswith(f"{SECTION}.fsdp_") for row in settings)
    of_trainer = "fsdp" in settings or "output_dir" in settings
    return "distributed_type" in settings or "compute_environment" in settings or (fragment and not of_trainer)


def read(settings: Settings, given: Given) -> Reading:
    launched = settings.first("distributed_type")
    found = common.unknown_keys(settings, SECTION, with_prefix(KEYS))
    kind = str(launched.value) if launched else "FSDP"
    if kind != "FSDP":
        use = Use(role="model", why_not=f"not under FSDP: {launched}")
        ignored = [row for row in settings.below(SECTION) if row.value is not None]
        if ignored:
            found.append(conflict("accelerate reads fsdp_config only with distributed_type=FSDP", launched, ignored[0]))
        return Reading(uses=(use,), findings=tuple(found))
    version = fsdp_version(settings, default=1)
    try:
        uses = merged([_use(settings, version, label) for label in _backends(settings, given)])
        found += version_conflicts(settings, version)
        model = common.Model(path=settings.first("model_name_or_path"), ranks=_shard_group(settings, given))
        uses, more = common.with_dims(uses, model)
    except Unreadable as error:
        use, finding = common.unreadable("model", error)
        return Reading(uses=(use,), findings=(*found, finding))
    return Reading(uses=uses, findings=(*found, *more))


def keys(name: str) -> tuple[str, str]:
    """A key of the section with accelerate's prefix, and without."""
    return f"{SECTION}.fsdp_{name}", f"{SECTION}.{name}"


def with_prefix(names: tuple[str, ...]) -> list[str]:
    return [f"fsdp_{name}" for name in names] + list(names)


def fsdp_version(settings: Settings, *, default: int) -> int:
    """1 or 2. Raises UsageError for one that is not known here."""
    row = settings.first(*keys("version"))
    if row is None:
        return default
    if str(row.value) not in ("1", "2"):
        raise UsageError(f"{row}: versions 1 and 2 of fsdp_config are known here")
    return int(str(row.value))


def reasons_of(scenario: Scenario, because_of: dict[str, str]) -> tuple[Reason, ...]:
    """A reason for each axis that has one, in the order of ``because_of``."""
    return tuple(
        Reason(axis=axis, value=getattr(scenario, axis), because=why) for axis, why in because_of.items() if why
    )


def extractions(scenario: Scenario, state_dict_type: str, *, vllm: bool) -> tuple[ExtractionPoint, ...]:
    """What Accelerator.get_state_dict and save_fsdp_model read, unstaged, and TRL's sync_weights with ``vllm``."""
    checkpoints = {
        (1, "FULL_STATE_DICT"): "full_state_dict.rank0+cpu",
        (1, "SHARDED_STATE_DICT"): "sharded_state_dict",
        (1, "LOCAL_STATE_DICT"): "local_state_dict",
        (2, "FULL_STATE_DICT"): "get_model_state_dict.full+cpu",
        (2, "SHARDED_STATE_DICT"): "get_model_state_dict.sharded+cpu",
    }
    whole = {1: "full_state_dict.rank0+cpu", 2: "get_model_state_dict.full+cpu"}
    sync = {1: "summon_full_params", 2: "state_dict.to.full_tensor"}
    rows = [("whole model (get_state_dict)", whole[scenario.version])]
    checkpoint = checkpoints.get((scenario.version, state_dict_type))
    if checkpoint is not None:
        rows.append(("checkpoint (save_state)", checkpoint))
    if vllm:
        rows.append(("weights for vLLM (TRL)", sync[scenario.version]))
    return tuple(ExtractionPoint(purpose=purpose, case=Case(scenario, path)) for purpose, path in rows)


def version_conflicts(settings: Settings, version: int) -> list[ConfigFinding]:
    """Keys of the other version: what becomes of them is in FullyShardedDataParallelPlugin.__post_init__."""
    if version == 2:
        rows = [row for name in VERSION_1_ONLY if (row := settings.first(*keys(name)))]
        found = [conflict("fsdp_version 2 does not read these, which are version 1's", *rows)] if rows else []
        local = settings.first(*keys("state_dict_type"))
        if local and str(local.value).upper() == "LOCAL_STATE_DICT":
            found.append(conflict("accelerate refuses LOCAL_STATE_DICT under fsdp_version 2", local))
        reshard = settings.first(*keys("reshard_after_forward"))
        if reshard and str(reshard.value).lower() not in ("true", "false"):
            found.append(conflict("reshard_after_forward is true or false under fsdp_version 2", reshard))
        return found
    reshard = settings.first(*keys("reshard_after_forward"))
    if reshard and isinstance(reshard.value, bool):
        return [conflict("reshard_after_forward is version 2's; version 1 has sharding_strategy", reshard)]
    return []


def _backends(settings: Settings, given: Given) -> list[tuple[str, Backend]]:
    """The versions of accelerate, and the backend that each gives."""
    if not settings.flag(*keys("offload_params")):
        whole = settings.word(*keys("state_dict_type")).upper() == "FULL_STATE_DICT"
        return [("", "mixed" if whole else "device-only")]
    ranges: list[tuple[str, Backend]] = [("before 1.7.0", "device-only"), ("since 1.7.0", "mixed")]
    known = given.framework_version
    return ranges if known is None else [ranges[known >= _MIXED_SINCE]]


def _use(settings: Settings, version: int, label: tuple[str, Backend]) -> Use:
    versions, backend = label
    version_row, offload_row = settings.first(*keys("version")), settings.first(*keys("offload_params"))
    strategy: Strategy = "fsdp2"
    why = because(version_row, "")
    if version == 1:
        orig = settings.flag(*keys("use_orig_params"), default=True)
        strategy = "fsdp1-orig" if orig else "fsdp1"
        orig_why = because(
            settings.first(*keys("use_orig_params")), "use_orig_params=true is accelerate launch's default"
        )
        why = f"{because(version_row, 'fsdp_version=1 is the default')}; {orig_why}"
    sharding, sharding_row = _sharding(settings, version)
    scenario = Scenario(
        strategy=strategy,
        offload="policy" if settings.flag(*keys("offload_params")) else "none",
        staging="unstaged",
        backend=backend,
        sharding=sharding,
    )
    whys = {
        "strategy": why,
        "offload": because(offload_row, "fsdp_offload_params=false is the default"),
        "backend": "accelerate/state.py: gloo beside NCCL for offload_params since 1.7.0, and for FULL_STATE_DICT",
        "sharding": str(sharding_row) if sharding != "full" else "",
    }
    default = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
    state_dict_type = settings.word(*keys("state_dict_type"), default=default).upper()
    return Use(
        role="model",
        versions=versions,
        scenario=scenario,
        reasons=reasons_of(scenario, whys),
        extractions=extractions(scenario, state_dict_type, vllm=settings.flag("use_vllm")),
    )


def _sharding(settings: Settings, version: int) -> tuple[Sharding, Setting | None]:
    row = settings.first(*keys("sharding_strategy"))
    names: dict[str, Sharding] = {"HYBRID": "hsdp", "NO_SHA": "size1", "4": "hsdp", "5": "hsdp", "3": "size1"}
    word = str(row.value).upper()[:6] if row and version == 1 else ""
    return names.get(word, "full"), row


def _shard_group(settings: Settings, given: Given) -> int | None:
    world = given.world_size or settings.number("num_processes")
    if not world or world < 1:
        return None
    sharding, _ = _sharding(settings, fsdp_version(settings, default=1))
    machines = settings.number("num_machines", default=1) or 1
    return {"full": world, "size1": 1, "hsdp": max(1, world // machines)}[sharding]
