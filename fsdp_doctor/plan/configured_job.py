"""Reads the job to plan from a configuration and command-line options. No torch."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from packaging.version import Version
from typing_extensions import assert_never

from fsdp_doctor.check import CheckResult, check, set_ranks
from fsdp_doctor.check.framework import Keys
from fsdp_doctor.check.frameworks import find_framework
from fsdp_doctor.check.frameworks.fsdp_config import HfTrainer
from fsdp_doctor.check.launch_commands import ENVIRONMENT, SECTION
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import CANNOT_BE_DETERMINED, Role, Use
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.axes import Sharding, Staging
from fsdp_doctor.matrix.model_shapes import MODEL_SHAPES
from fsdp_doctor.plan.job import BF16, FP32, Dtypes, EngineSetup, JobSetup, Machines, RoleSetup
from fsdp_doctor.text import format_count


class SizeKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration keys of one role's sizes, and the framework's defaults.

    sequences: keys of the number of sequences in a micro batch.
    lengths: keys whose values add up to the number of tokens in a sequence.
    dynamic: flags that fill a micro batch up to a number of tokens.
    token_budget: keys of the number of tokens in a micro batch, used if ``dynamic`` is set.
    checkpointing: keys of activation checkpointing; any value except none, false, no, off and 0 switches it on.
    master_dtype: keys of the dtype of the shards.
    """

    sequences: Keys = ()
    default_sequences: int = 1
    lengths: tuple[Keys, ...] = ()
    default_length: int = 1024
    dynamic: Keys = ()
    token_budget: Keys = ()
    default_budget: int = 16384
    checkpointing: Keys = ()
    checkpointing_default: bool = False
    master_dtype: Keys = ()


class EngineKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration keys of a rollout engine.

    asked: keys of the engine; if none of them is set, the job has no engine. Empty if it always has an engine.
    apart: sections that exist only if the engine has separate devices.
    colocated: flags that are false if the engine has separate devices.
    sleeps: flags that are false if the engine keeps its memory while the trainer works.
    bucket_mib: keys of the bucket size of the weight transfer, in MiB.
    loads_model_before: the framework's first version in which a worker of an engine on separate devices no longer
        loads the FSDP model.
    """

    utilization: Keys
    default_utilization: float
    tensor_parallel: Keys
    default_tensor_parallel: int = 1
    bucket_mib: Keys = ()
    default_bucket_mib: int = 512
    asked: Keys = ()
    apart: Keys = ()
    colocated: Keys = ()
    sleeps: Keys = ()
    loads_model_before: str = ""


class MachineKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration keys of devices and nodes.

    gpus: keys of the number of devices in a node.
    nodes: keys of the number of nodes.
    ranks: keys of the number of ranks on all nodes.
    words: whether values can be words instead of numbers, such as ``auto``.
    """

    gpus: Keys = ()
    nodes: Keys = ()
    ranks: Keys = ()
    words: bool = False


class PlanKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``plan`` of a framework's table in ``check/frameworks``: the keys of machines, engine and sizes.

    sizes: the keys of the sizes by role; the role ``any`` stands for every role without its own keys.
    """

    machines: MachineKeys = MachineKeys()
    engine: EngineKeys | None = None
    sizes: Mapping[str, SizeKeys] = {}


@functools.cache
def _read_keys(framework: str) -> PlanKeys:
    return msgspec.convert(find_framework(framework).facts.plan, PlanKeys)


def _find_size_keys(framework: str, role: Role) -> SizeKeys:
    # A framework without sizes of its own has those of Hugging Face's trainers.
    sizes = _read_keys(framework).sizes or _read_keys(HfTrainer.facts.name).sizes
    return sizes.get(role) or sizes["any"]


# A configuration of accelerate that says no more than that it is FSDP2.
PLAIN_FSDP2 = ("distributed_type=FSDP", "fsdp_config.fsdp_version=2")
_DEFAULT_GPUS = 8
_LAUNCHED_GPUS = (
    *(f"{SECTION}.{name}" for name in ("nproc_per_node", "num_gpus", "gpus_per_node")),
    f"{ENVIRONMENT}.NPROC_PER_NODE",
)
_LAUNCHED_NODES = (*(f"{SECTION}.{name}" for name in ("num_machines", "nnodes", "num_nodes")), f"{ENVIRONMENT}.NNODES")
# With more tokens in one forward, the bytes of a tensor overflow torch's integers.
_MOST_TOKENS = 1_000_000_000
# Methods whose checkpoint is whole on the host of the first rank.
_SAVES_WHOLE = ("get_model_state_dict.full+cpu", "full_state_dict.rank0+cpu")
# Names of a dtype in torch and the frameworks, without "torch." before it.
_HALF = ("bf16", "bfloat16", "fp16", "float16", "half")
_FULL = ("", "fp32", "float32", "float")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command-line options, which take precedence over the configuration; an option that is not given is None.

    gpu_memory: bytes of memory of a device.
    host_memory: bytes of host memory of a node.
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


def read_job(arguments: Sequence[str], options: PlanOptions) -> JobSetup:
    """Reads the job from a configuration and options.

    Raises UsageError for a configuration that cannot be read, CannotRun for a job without FSDP.
    """
    result = check(arguments, framework_version=options.framework_version)
    _refuse_without_fsdp(result)
    try:
        gpus, nodes = _read_machines(result)
        machines = Machines(
            gpus=options.gpus or gpus or _DEFAULT_GPUS,
            nodes=options.nodes or nodes,
            gpu_memory=options.gpu_memory,
            host_memory=options.host_memory,
        )
        if machines.ranks != result.world_size:
            result = set_ranks(result, machines.ranks)
        # Where versions differ, the use of the newest range, which is read last.
        uses = list({use.role: use for use in result.uses if use.scenario is not None}.values())
        roles = tuple(_read_role(use, result, machines, options) for use in uses)
        engine = _read_engine(result, machines.ranks)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    unread = [
        f"{use.role}: the plan assumes training of all parameters without the adapter, which takes more memory"
        for use in uses
        if use.scenario and use.scenario.model.has_adapters
    ]
    if not (options.gpus or gpus):
        sentence = "the configuration does not say how many devices a node has"
        unread.append(f"{sentence}, so {_DEFAULT_GPUS} are assumed: give --gpus")
    unread += [sentence for use in uses if (sentence := _describe_default_sizes(use.role, result, options))]
    return JobSetup(framework=result.framework, machines=machines, roles=roles, engine=engine, unread=tuple(unread))


def _refuse_without_fsdp(result: CheckResult) -> None:
    undetermined = [use.role for use in result.uses if use.why_not == CANNOT_BE_DETERMINED]
    if undetermined:
        unknown = [finding.sentence for finding in result.findings if finding.kind == "unknown"]
        about = [sentence for sentence in unknown if sentence.startswith(tuple(f"{role}: " for role in undetermined))]
        raise CannotRun(f"the job cannot be determined from this configuration: {'; '.join(about or unknown)}")
    if deciding := [f"{', '.join(one.settings)}: {one.sentence}" for one in result.findings if one.decides]:
        raise CannotRun(f"the job cannot be determined from this configuration: {'; '.join(deciding)}")
    try:
        # Where a size cannot be read, `check` says what holds for every one; a plan needs the size.
        set_ranks(result, result.world_size or 1)
    except Unreadable as error:
        raise CannotRun(f"the job cannot be determined from this configuration: {error}") from None
    if all(use.scenario is None for use in result.uses):
        why = "; ".join(dict.fromkeys(f"{use.title}: {use.why_not}" for use in result.uses if use.why_not))
        raise CannotRun(f"there is no FSDP in this configuration to plan ({why or 'no model was read'})")


def _read_machines(result: CheckResult) -> tuple[int | None, int]:
    """Returns the number of devices in each node (None if not configured) and the number of nodes.

    Raises Unreadable for a number below 1, and for ranks that cannot be divided evenly over the nodes.
    """
    keys, settings, ranks = _read_keys(result.framework).machines, result.settings, result.world_size
    _read_positive(settings, *keys.ranks)
    read = _read_launched_count if keys.words else _read_positive
    gpus = read(settings, *keys.gpus) or _read_launched_count(settings, *_LAUNCHED_GPUS)
    nodes = read(settings, *keys.nodes) or _read_launched_count(settings, *_LAUNCHED_NODES)
    if ranks is None:
        return gpus, nodes or 1
    if nodes and not gpus and ranks % nodes:
        raise Unreadable(f"{format_count(ranks, 'rank')} cannot be divided evenly over {format_count(nodes, 'node')}")
    nodes = -(-ranks // gpus) if gpus else nodes or -(-ranks // _DEFAULT_GPUS)
    return -(-ranks // nodes), nodes


def _read_positive(settings: Settings, *keys: str) -> int | None:
    """Reads the number of the first key that is set; None if no key is set. Raises Unreadable for a number below 1."""
    number = settings.read_number(*keys)
    if number is not None and number < 1:
        raise Unreadable(f"{settings.find_first(*keys)} must be at least 1")
    return number


def _read_launched_count(settings: Settings, *keys: str) -> int | None:
    """Reads a count from a launch command; None for words such as gpu, auto or -1, and for shell variables.

    Raises Unreadable for a number below 1.
    """
    count = settings.count(*keys)
    if count is not None and count < 1:
        raise Unreadable(f"{settings.find_first(*keys)} must be at least 1")
    return count


def _read_role(use: Use, result: CheckResult, machines: Machines, options: PlanOptions) -> RoleSetup:
    assert use.scenario is not None
    keys, settings, named = _find_size_keys(result.framework, use.role), result.settings, result.models.get(use.role)
    length = options.length or _read_length(keys, settings)
    sequences = options.sequences or _read_sequences(keys, settings, length)
    configured = named.ranks if named and named.ranks else _shard_group(use.scenario.sharding, machines)
    shard_ranks = min(configured, machines.ranks)
    if machines.ranks % shard_ranks:
        raise UsageError(f"{use.role}: a shard group of {shard_ranks} ranks does not divide the {machines.ranks} ranks")
    if sequences * length > _MOST_TOKENS:
        raise UsageError(
            f"{use.role}: {format_count(sequences, 'sequence')} of {length} tokens are more than {_MOST_TOKENS:,} at "
            "once"
        )
    method = next((point.case.method for point in use.extractions if point.case.scenario.phase.is_trained), "")
    staging = next((p.case.scenario.staging for p in use.extractions if p.case.method == method), Staging.UNSTAGED)
    return RoleSetup(
        role=use.role,
        scenario=dataclasses.replace(use.scenario, staging=staging),
        shard_ranks=shard_ranks,
        model=_read_model(use.role, result, options),
        layers=options.layers,
        replicas=machines.ranks // shard_ranks,
        trains=use.role != "ref",
        head="value" if use.role == "critic" else "language",
        sequences=sequences,
        length=length,
        checkpointing=_read_checkpointing(keys, settings),
        dtypes=Dtypes(master=_read_master_bytes(keys, settings)),
        method=method,
        saved_whole=any(point.case.method in _SAVES_WHOLE for point in use.extractions),
    )


def _shard_group(sharding: Sharding, machines: Machines) -> int:
    """Returns the default number of ranks in a shard group; under HSDP a shard group is one node."""
    match sharding:
        case Sharding.SIZE1 | Sharding.REPLICATE:
            return 1
        case Sharding.HSDP:
            return machines.gpus
        case Sharding.FULL | Sharding.TP | Sharding.EXPERTS | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
            return machines.ranks
        case _:
            assert_never(sharding)


def _read_length(keys: SizeKeys, settings: Settings) -> int:
    lengths = [_read_positive(settings, *each) for each in keys.lengths]
    if not any(lengths):
        return keys.default_length
    return sum(number or keys.default_length // len(lengths) for number in lengths)


def _read_sequences(keys: SizeKeys, settings: Settings, length: int) -> int:
    """Reads the number of sequences in a micro batch; with a token budget, the number that fills the budget."""
    sequences = _read_positive(settings, *keys.sequences) or keys.default_sequences
    if settings.read_flag(*keys.dynamic):
        budget = _read_positive(settings, *keys.token_budget) or keys.default_budget
        return -(-budget // length)
    return sequences


def _read_checkpointing(keys: SizeKeys, settings: Settings) -> bool:
    row = settings.find_first(*keys.checkpointing)
    if row is None:
        return keys.checkpointing_default
    return str(row.value).lower() not in ("false", "none", "no", "0", "off")


def _read_master_bytes(keys: SizeKeys, settings: Settings) -> int:
    word = settings.read_word(*keys.master_dtype).removeprefix("torch.").lower()
    if word not in _HALF + _FULL:
        raise Unreadable(
            f"{settings.find_first(*keys.master_dtype)} is not a dtype of shards; use float32, bfloat16 or float16"
        )
    return BF16 if word in _HALF else FP32


def _read_engine(result: CheckResult, ranks: int) -> EngineSetup | None:
    keys, settings = _read_keys(result.framework).engine, result.settings
    actor = next((use for use in result.uses if use.role == "actor"), None)
    if keys is None or actor is None or (keys.asked and settings.find_first(*keys.asked) is None):
        return None
    word = settings.read_word(*keys.utilization, default=str(keys.default_utilization))
    try:
        utilization = float(word)
    except ValueError:
        raise Unreadable(f"{settings.find_first(*keys.utilization)} is not a number") from None
    if not 0 < utilization <= 1:
        raise Unreadable(
            f"{settings.find_first(*keys.utilization)} is not a share of the device: more than 0, at most 1"
        )
    is_colocated = settings.read_flag(*keys.colocated, default=True)
    tensor_parallel = _read_positive(settings, *keys.tensor_parallel) or keys.default_tensor_parallel
    is_apart = not is_colocated or any(settings.list_below(section) for section in keys.apart)
    if not is_apart and tensor_parallel > ranks and (row := settings.find_first(*keys.tensor_parallel)):
        raise Unreadable(f"{row}: there are {format_count(ranks, 'device')}")
    version = result.version.version
    is_old = bool(version and keys.loads_model_before and version < Version(keys.loads_model_before))
    return EngineSetup(
        is_apart=is_apart,
        sleeps=settings.read_flag(*keys.sleeps, default=True),
        loads_model=is_apart and is_old and bool(actor.scenario and not actor.scenario.param_offload),
        utilization=utilization,
        tensor_parallel=tensor_parallel,
        bucket_bytes=(_read_positive(settings, *keys.bucket_mib) or keys.default_bucket_mib) << 20,
    )


def _read_model(role: Role, result: CheckResult, options: PlanOptions) -> str:
    """Returns the model's directory, or the name of a built-in shape. Raises UsageError if there is neither."""
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
        f"{role}: {path} is neither a directory with a config.json nor a known shape; give --model DIR, or --model "
        f"with one of these shapes: {', '.join(MODEL_SHAPES)}"
    )


def _describe_default_sizes(role: Role, result: CheckResult, options: PlanOptions) -> str:
    """Returns a sentence on sizes for which a default is used, because they are not configured; or an empty string."""
    keys, settings = _find_size_keys(result.framework, role), result.settings
    sequences = keys.token_budget if settings.read_flag(*keys.dynamic) else keys.sequences
    is_given = {
        "--micro-batch": options.sequences or settings.find_first(*sequences),
        "--seq-len": options.length or any(settings.find_first(*each) for each in keys.lengths),
    }
    missing = [option for option, given in is_given.items() if not given]
    sentence = "the configuration does not say how much is computed at once; a default is used unless you give"
    return f"{role}: {sentence} {' and '.join(missing)}" if missing else ""
