"""Reads a job to plan from a configuration and options. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from fsdp_doctor.check import CheckResult, check, with_ranks
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import CANNOT_BE_DETERMINED, Role, Use
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.plan.framework_sizes import DEFAULT_GPUS, ENGINES, Sizes, at_least_one, configured_machines, sizes_of
from fsdp_doctor.plan.job_setup import BF16, FP32, Dtypes, EngineSetup, JobSetup, Machines, RoleSetup
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES
from fsdp_doctor.report.layout import counted

# Of one forward: with more, the bytes of a tensor overflow torch's integers.
_MOST_TOKENS = 1_000_000_000
# Paths of a checkpoint that is whole on the host of the first rank.
_SAVES_WHOLE = ("get_model_state_dict.full+cpu", "full_state_dict.rank0+cpu")
_FORWARD_ONLY = ("ref",)
# Of what torch and the frameworks call a dtype, without "torch." before it.
_HALF = ("bf16", "bfloat16", "fp16", "float16", "half")
_FULL = ("", "fp32", "float32", "float")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options, which go before the configuration; None where they are not given.

    gpu_memory, host_memory: bytes of a device, and of a node.
    """

    model: str | None = None
    layers: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpu_memory: int
    host_memory: int | None = None
    length: int | None = None
    sequences: int | None = None
    framework_version: str | None = None


def planned_job(arguments: Sequence[str], options: PlanOptions) -> JobSetup:
    """Raises UsageError for a configuration that cannot be read, CannotRun for a job without FSDP."""
    result = check(arguments, framework_version=options.framework_version)
    uses = _one_for_each_role(result)
    undetermined = [use.role for use in result.uses if use.why_not == CANNOT_BE_DETERMINED]
    if undetermined:
        unknown = [finding.sentence for finding in result.findings if finding.kind == "unknown"]
        about = [sentence for sentence in unknown if sentence.startswith(tuple(f"{role}: " for role in undetermined))]
        raise CannotRun(f"the job cannot be determined from this configuration: {'; '.join(about or unknown)}")
    if not uses:
        why = "; ".join(dict.fromkeys(f"{use.title}: {use.why_not}" for use in result.uses if use.why_not))
        raise CannotRun(f"there is no FSDP in this configuration to plan ({why or 'no model was read'})")
    try:
        gpus, nodes = configured_machines(result.framework, result.settings, result.world_size)
        machines = _machines(gpus, nodes, options)
        if machines.ranks != result.world_size:
            result = with_ranks(result, machines.ranks)
        uses = _one_for_each_role(result)
        roles = tuple(_role(use, result, machines, options) for use in uses)
        engine = _engine(result, machines.ranks)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    models = tuple(_model(use.role, result, options) for use in uses)
    return JobSetup(
        framework=result.framework,
        machines=machines,
        roles=roles,
        models=models,
        engine=engine,
        layers=options.layers,
        saved_whole=tuple(
            use.role for use in uses if any(point.case.path in _SAVES_WHOLE for point in use.extractions)
        ),
        unread=(*_unread(uses), *_taken_gpus(options.gpus or gpus), *_taken_sizes(result, uses, options)),
    )


def _one_for_each_role(result: CheckResult) -> list[Use]:
    """The use of each role; where versions differ, of the newest range, which is read last."""
    return list({use.role: use for use in result.uses if use.scenario is not None}.values())


def _machines(gpus: int | None, nodes: int, options: PlanOptions) -> Machines:
    """The configured machines; an option replaces its own number alone."""
    return Machines(
        gpus=options.gpus or gpus or DEFAULT_GPUS,
        nodes=options.nodes or nodes,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory,
    )


def _role(use: Use, result: CheckResult, machines: Machines, options: PlanOptions) -> RoleSetup:
    assert use.scenario is not None
    sizes, settings = sizes_of(result.framework, use.role), result.settings
    length = options.length or _length(sizes, settings)
    sequences = options.sequences or _sequences(sizes, settings, length)
    named = result.models.get(use.role)
    shard_ranks = min(named.ranks if named and named.ranks else _shard_ranks(use.scenario, machines), machines.ranks)
    if machines.ranks % shard_ranks:
        raise UsageError(f"{use.role}: a shard group of {shard_ranks} ranks does not divide the {machines.ranks} ranks")
    if sequences * length > _MOST_TOKENS:
        raise UsageError(
            f"{use.role}: {counted(sequences, 'sequence')} of {length} tokens are more than {_MOST_TOKENS:,} at once"
        )
    path = next((point.case.path for point in use.extractions if point.case.scenario.phase == "trained"), "")
    staged = next((p.case.scenario.staging for p in use.extractions if p.case.path == path), "unstaged")
    return RoleSetup(
        role=use.role,
        scenario=use.scenario.changed(staging=staged),
        shard_ranks=shard_ranks,
        replicas=machines.ranks // shard_ranks,
        trains=use.role not in _FORWARD_ONLY,
        head="value" if use.role == "critic" else "language",
        sequences=sequences,
        length=length,
        checkpointing=_checkpointing(sizes, settings),
        dtypes=Dtypes(master=_master_bytes(settings, sizes)),
        path=path,
    )


def _shard_ranks(scenario: Scenario, machines: Machines) -> int:
    """Ranks of one shard group where the configuration gives no number: a hybrid one is a node."""
    return {"size1": 1, "hsdp": machines.gpus}.get(scenario.sharding, machines.ranks)


def _length(sizes: Sizes, settings: Settings) -> int:
    lengths = [at_least_one(settings, *keys) for keys in sizes.lengths]
    if not any(lengths):
        return sizes.default_length
    return sum(number or sizes.default_length // len(lengths) for number in lengths)


def _sequences(sizes: Sizes, settings: Settings, length: int) -> int:
    """Sequences of a micro batch; as many as reach the budget where it is filled up to a number of tokens."""
    sequences = at_least_one(settings, *sizes.sequences) or sizes.default_sequences
    if settings.flag(*sizes.dynamic):
        budget = at_least_one(settings, *sizes.token_budget) or sizes.default_budget
        return -(-budget // length)
    return sequences


def _checkpointing(sizes: Sizes, settings: Settings) -> bool:
    row = settings.first(*sizes.checkpointing)
    if row is None:
        return sizes.checkpointing_default
    return str(row.value).lower() not in ("false", "none", "no", "0", "off")


def _master_bytes(settings: Settings, sizes: Sizes) -> int:
    word = settings.word(*sizes.master_dtype).removeprefix("torch.").lower()
    if word not in _HALF + _FULL:
        raise Unreadable(f"{settings.first(*sizes.master_dtype)} is no dtype of shards: float32, bfloat16 or float16")
    return BF16 if word in _HALF else FP32


def _engine(result: CheckResult, ranks: int) -> EngineSetup | None:
    keys, settings = ENGINES.get(result.framework), result.settings
    roles = [use.role for use in result.uses]
    if keys is None or "actor" not in roles:
        return None
    if keys.asked and settings.first(*keys.asked) is None:
        return None
    word = settings.word(*keys.utilization, default=str(keys.default_utilization))
    try:
        utilization = float(word)
    except ValueError:
        raise Unreadable(f"{settings.first(*keys.utilization)} is not a number") from None
    if not 0 < utilization <= 1:
        raise Unreadable(f"{settings.first(*keys.utilization)} is not a share of the device: more than 0, at most 1")
    is_colocated = settings.flag(*keys.colocated, default=True)
    tensor_parallel = at_least_one(settings, *keys.tensor_parallel) or keys.default_tensor_parallel
    is_apart = not is_colocated or any(settings.below(section) for section in keys.apart)
    if not is_apart and tensor_parallel > ranks and (row := settings.first(*keys.tensor_parallel)):
        raise Unreadable(f"{row}: there are {counted(ranks, 'device')}")
    version = result.version.version
    is_old = bool(version and keys.loads_model_before and version < Version(keys.loads_model_before))
    actor = next(use for use in result.uses if use.role == "actor")
    return EngineSetup(
        is_apart=is_apart,
        sleeps=settings.flag(*keys.sleeps, default=True),
        loads_model=is_apart and is_old and bool(actor.scenario and not actor.scenario.param_offload),
        utilization=utilization,
        tensor_parallel=tensor_parallel,
        bucket_bytes=(at_least_one(settings, *keys.bucket_mib) or keys.default_bucket_mib) << 20,
    )


def _model(role: Role, result: CheckResult, options: PlanOptions) -> str:
    """The model's directory, or the named shape that its name stands for. Raises UsageError."""
    named = result.models.get(role)
    path = options.model or (str(named.path.value) if named and named.path else "")
    if not path:
        raise UsageError(f"{role}: the configuration does not name a model; give --model")
    directory = os.path.expanduser(path)
    if path in MODEL_SHAPES or os.path.isfile(os.path.join(directory, "config.json")):
        return path
    tail = path.rstrip("/").rpartition("/")[2].lower()
    for name in (tail, tail.removesuffix("-instruct"), tail.removesuffix("-base")):
        if name in MODEL_SHAPES:
            return name
    if os.path.isdir(directory):
        raise UsageError(f"{role}: {path}: the directory has no config.json")
    raise UsageError(
        f"{role}: {path} is neither a directory with a config.json nor a known shape; give --model, a directory or one "
        f"of {', '.join(MODEL_SHAPES)}"
    )


def _taken_gpus(gpus: int | None) -> list[str]:
    if gpus is not None:
        return []
    return [f"the configuration does not say how many devices a node has, and {DEFAULT_GPUS} are taken: give --gpus"]


def _taken_sizes(result: CheckResult, uses: Sequence[Use], options: PlanOptions) -> list[str]:
    """Sentences on sizes that are not configured, so that a default is taken."""
    sentences = []
    for use in uses:
        sizes, settings = sizes_of(result.framework, use.role), result.settings
        filled = settings.flag(*sizes.dynamic)
        is_given = {
            "--micro-batch": options.sequences or settings.first(*(sizes.token_budget if filled else sizes.sequences)),
            "--seq-len": options.length or any(settings.first(*keys) for keys in sizes.lengths),
        }
        if missing := [option for option, given in is_given.items() if not given]:
            sentence = "the configuration does not say how much is computed at once, and a default is taken: give"
            sentences.append(f"{use.role}: {sentence} {' and '.join(missing)}")
    return sentences


def _unread(uses: Sequence[Use]) -> tuple[str, ...]:
    adapters = [use.role for use in uses if use.scenario and use.scenario.model == "qwen3-lora"]
    sentence = "the adapter is not in it: the plan is that of training all parameters, which takes more"
    return tuple(f"{role}: {sentence}" for role in adapters)
