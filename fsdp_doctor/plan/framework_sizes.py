"""Where each framework's settings say how much is computed at once, and what its rollout engine is given.

Read where ``check`` reads them; what a framework has where nothing is set is in ``Sizes``. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_doctor.check.frameworks.framework import Keys
from fsdp_doctor.check.use import Role


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The keys of one role's sizes, and what is taken where none of them is set.

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

    asked: keys of which one is set where there is such an engine; empty where the framework always has one.
    apart: sections that say, when there, that the engine has devices of its own. colocated: flags that say so when
    they are false. sleeps: flags that say, when false, that it keeps its share while the trainer works.
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
