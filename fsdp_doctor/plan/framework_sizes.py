"""The settings of each framework that say how much is computed at once, on how many machines, beside which engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_doctor.check.frameworks.framework import Keys
from fsdp_doctor.check.launch_commands import ENVIRONMENT, SECTION
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Role
from fsdp_doctor.report.layout import counted


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The keys of one role's sizes, and the framework's defaults.

    sequences: of a micro batch. lengths: keys whose values add up to the tokens of a sequence.
    token_budget: tokens of a micro batch, where dynamic says that it is filled up so.
    checkpointing: of activations; a word other than none or false is true. master_dtype: of the shards.
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


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """The keys of a rollout engine.

    asked: keys of which one is set if there is an engine; empty if the framework always has one.
    apart: sections that exist if the engine has devices of its own. colocated: flags that are false if it has.
    sleeps: flags that are false if the engine keeps its share while the trainer works.
    bucket_mib: of the weights' transfer.
    loads_model_before: the version before which a worker of such an engine loads the FSDP model, too.
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


_VERL_LENGTHS: tuple[Keys, ...] = (("data.max_prompt_length",), ("data.max_response_length",))
_ACTOR = "actor_rollout_ref.actor"
_VERL: Mapping[Role, Sizes] = {
    "actor": Sizes(
        sequences=(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size"),
        lengths=_VERL_LENGTHS,
        dynamic=(f"{_ACTOR}.use_dynamic_bsz",),
        token_budget=(f"{_ACTOR}.ppo_max_token_len_per_gpu",),
        checkpointing=("actor_rollout_ref.model.enable_gradient_checkpointing",),
        checkpointing_default=True,
        master_dtype=(f"{_ACTOR}.fsdp_config.model_dtype",),
    ),
    "ref": Sizes(
        sequences=("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",),
        lengths=_VERL_LENGTHS,
        dynamic=("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
        token_budget=("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
        master_dtype=("actor_rollout_ref.ref.fsdp_config.model_dtype",),
    ),
    "critic": Sizes(
        sequences=("critic.ppo_micro_batch_size_per_gpu",),
        lengths=_VERL_LENGTHS,
        dynamic=("critic.use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
        token_budget=("critic.ppo_max_token_len_per_gpu",),
        default_budget=32768,
        checkpointing=("critic.model.enable_gradient_checkpointing",),
        checkpointing_default=True,
        master_dtype=("critic.fsdp.model_dtype", "critic.model.fsdp_config.model_dtype"),
    ),
    "model": Sizes(
        sequences=("data.micro_batch_size_per_gpu", "engine.micro_batch_size_per_gpu"),
        default_sequences=4,
        lengths=(("data.max_length",),),
        dynamic=("data.use_dynamic_bsz",),
        token_budget=("data.max_token_len_per_gpu",),
        checkpointing=("model.enable_gradient_checkpointing",),
        checkpointing_default=True,
        master_dtype=("engine.model_dtype", "model.fsdp_config.model_dtype"),
    ),
}
_SKYRL = Sizes(
    sequences=("trainer.micro_train_batch_size_per_gpu",),
    lengths=(("generator.max_input_length",), ("generator.sampling_params.max_generate_length",)),
    checkpointing=("trainer.gradient_checkpointing",),
    checkpointing_default=True,
)
_HF = Sizes(
    sequences=("per_device_train_batch_size", "micro_batch_size"),
    default_sequences=8,
    lengths=(("max_length", "max_seq_length", "sequence_len", "cutoff_len"),),
    checkpointing=(
        *("gradient_checkpointing", "fsdp_config.activation_checkpointing"),
        "fsdp_config.fsdp_activation_checkpointing",
    ),
)
_NEMO = Sizes(
    sequences=("policy.train_micro_batch_size",),
    lengths=(("policy.max_total_sequence_length",),),
    checkpointing=("policy.dtensor_cfg.activation_checkpointing",),
)
_AREAL = Sizes(
    lengths=(("actor.mb_spec.max_tokens_per_mb",),),
    checkpointing=("actor.gradient_checkpointing",),
)
_PRIME = Sizes(
    sequences=("trainer.data.micro_batch_size", "data.micro_batch_size"),
    lengths=(("trainer.model.seq_len", "model.seq_len", "seq_len"),),
    checkpointing=("trainer.model.ac", "model.ac"),
)
_TITAN = Sizes(
    sequences=("training.local_batch_size", "training.batch_size"),
    default_sequences=8,
    lengths=(("training.seq_len",),),
    default_length=2048,
    checkpointing=("activation_checkpoint.mode",),
    checkpointing_default=True,
)
_OF_FRAMEWORK: Mapping[str, Sizes] = {
    "SkyRL": _SKYRL,
    "NeMo-RL": _NEMO,
    "AReaL": _AREAL,
    "prime-rl": _PRIME,
    "torchtitan": _TITAN,
}
ENGINES: Mapping[str, EngineSizes] = {
    "verl": EngineSizes(
        utilization=("actor_rollout_ref.rollout.gpu_memory_utilization",),
        default_utilization=0.5,
        tensor_parallel=("actor_rollout_ref.rollout.tensor_model_parallel_size",),
        default_tensor_parallel=2,
        bucket_mib=(
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        ),
        default_bucket_mib=2048,
        asked=("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        apart=("async_training", "rollout"),
        sleeps=("actor_rollout_ref.rollout.free_cache_engine",),
        loads_model_before="0.8",
    ),
    "SkyRL": EngineSizes(
        utilization=("generator.gpu_memory_utilization",),
        default_utilization=0.8,
        tensor_parallel=("generator.inference_engine_tensor_parallel_size",),
        colocated=("trainer.placement.colocate_all",),
    ),
    "NeMo-RL": EngineSizes(
        utilization=("policy.generation.vllm_cfg.gpu_memory_utilization",),
        default_utilization=0.6,
        tensor_parallel=("policy.generation.vllm_cfg.tensor_parallel_size",),
        asked=("policy.generation.backend", "policy.generation.vllm_cfg.gpu_memory_utilization"),
        colocated=("policy.generation.colocated.enabled",),
    ),
}


def sizes_of(framework: str, role: Role) -> Sizes:
    if framework == "verl":
        return _VERL[role]
    return _OF_FRAMEWORK.get(framework, _HF)


DEFAULT_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class _MachineKeys:
    """The keys of devices and nodes. ranks: of all nodes together. words: whether values can be other than numbers."""

    gpus: Keys = ()
    nodes: Keys = ()
    ranks: Keys = ()
    words: bool = False


_MACHINES: Mapping[str, _MachineKeys] = {
    "verl": _MachineKeys(gpus=("trainer.n_gpus_per_node",), nodes=("trainer.nnodes",)),
    "SkyRL": _MachineKeys(
        gpus=("trainer.placement.policy_num_gpus_per_node",), nodes=("trainer.placement.policy_num_nodes",)
    ),
    "NeMo-RL": _MachineKeys(gpus=("cluster.gpus_per_node",), nodes=("cluster.num_nodes",)),
    "prime-rl": _MachineKeys(gpus=("deployment.gpus_per_node",), nodes=("deployment.num_train_nodes",)),
    "AReaL": _MachineKeys(gpus=("cluster.n_gpus_per_node",), nodes=("cluster.n_nodes",)),
    "Lightning": _MachineKeys(gpus=("trainer.devices",), nodes=("trainer.num_nodes",), words=True),
    "axolotl": _MachineKeys(gpus=("nproc_per_node",), nodes=("num_machines", "nnodes"), ranks=("num_processes",)),
    "accelerate": _MachineKeys(nodes=("num_machines",), ranks=("num_processes",)),
}
_LAUNCHED_GPUS = (
    *(f"{SECTION}.{name}" for name in ("nproc_per_node", "num_gpus", "gpus_per_node")),
    f"{ENVIRONMENT}.NPROC_PER_NODE",
)
_LAUNCHED_NODES = (*(f"{SECTION}.{name}" for name in ("num_machines", "nnodes", "num_nodes")), f"{ENVIRONMENT}.NNODES")


def at_least_one(settings: Settings, *keys: str) -> int | None:
    """The number of the first key that is set; None if none is. Raises Unreadable for less than 1."""
    number = settings.number(*keys)
    if number is not None and number < 1:
        raise Unreadable(f"{settings.first(*keys)} must be at least 1")
    return number


def configured_machines(framework: str, settings: Settings, ranks: int | None) -> tuple[int | None, int]:
    """Devices of each node, None where they are not configured, and nodes. ranks: as ``check`` read them.

    Raises Unreadable for less than 1, and for ranks that are not as many on each node.
    """
    keys = _MACHINES.get(framework, _MachineKeys())
    at_least_one(settings, *keys.ranks)
    read = _launched_count if keys.words else at_least_one
    gpus = read(settings, *keys.gpus) or _launched_count(settings, *_LAUNCHED_GPUS)
    nodes = read(settings, *keys.nodes) or _launched_count(settings, *_LAUNCHED_NODES)
    if ranks is None:
        return gpus, nodes or 1
    if nodes and not gpus and ranks % nodes:
        raise Unreadable(f"{counted(ranks, 'rank')} cannot be as many on each of {counted(nodes, 'node')}")
    nodes = -(-ranks // gpus) if gpus else nodes or -(-ranks // DEFAULT_GPUS)
    return -(-ranks // nodes), nodes


def _launched_count(settings: Settings, *keys: str) -> int | None:
    """The count of the first key that is set; None for words such as gpu, auto or -1, and for shell variables."""
    count = settings.count(*keys)
    if count is not None and count < 1:
        raise Unreadable(f"{settings.first(*keys)} must be at least 1")
    return count
