"""The models that verl builds, and where the settings of each stand (trainer/ppo/utils.py)."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.check.config_findings import ConfigFinding, note
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Role
from fsdp_doctor.matrix.axes import Strategy

ENGINE_KEYS = ("strategy", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size", "use_orig_params")
KEYS = (
    *ENGINE_KEYS,
    *("_target_", "wrap_policy", "reshard_after_forward", "forward_prefetch", "model_dtype", "mixed_precision"),
    *("seed", "full_determinism", "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking"),
    *("entropy_from_logits_chunk_size", "use_torch_compile", "entropy_checkpointing", "pad_to_length"),
    *("pad_to_length_bucket", "forward_only", "dtype", "qat", "turbo_config", "infer_max_token_len_per_gpu"),
    *("infer_micro_batch_size_per_gpu", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_dynamic_bsz"),
    *("use_remove_padding", "use_fused_kernels", "enable_activation_offload"),
)
_STRATEGIES: dict[str, Strategy] = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


@dataclass(frozen=True, kw_only=True)
class VerlModel:
    """A model of a run: where its settings stand, in newer and older layouts, and what verl does with it.

    sections: of its FSDP settings. strategies: the keys that decide between FSDP1, FSDP2 and other engines, before
    the one in its sections. model, checkpoint: the sections of those settings; without checkpoint it is never saved.
    synced: its weights go to the rollout. forward_only: it is under the policy whatever is asked for.
    """

    role: Role
    sections: tuple[str, ...]
    strategies: tuple[str, ...]
    model: str
    checkpoint: str = ""
    synced: bool = False
    forward_only: bool = False

    def keys(self, name: str) -> list[str]:
        return [f"{section}.{name}" for section in self.sections]

    def outer_strategy(self, settings: Settings) -> Setting | None:
        """The strategy outside of its sections, which the trainer follows."""
        return settings.first(*self.strategies)

    def inner_strategy(self, settings: Settings) -> Setting | None:
        """The strategy in its sections, which the engine followed until PR 5885."""
        return settings.first(*self.keys("strategy"))

    def strategy_row(self, settings: Settings) -> Setting | None:
        return settings.first(*self.strategies, *self.keys("strategy"))

    def strategy(self, settings: Settings) -> Strategy | None:
        """FSDP1 or FSDP2, without a look at use_orig_params; None for another engine."""
        return _STRATEGIES.get(settings.word(*self.strategies, *self.keys("strategy"), default="fsdp"))

    def fsdp_size(self, settings: Settings) -> int:
        """The ranks of one shard group; what is not positive means all."""
        return settings.number(*self.keys("fsdp_size")) or -1


ACTOR = VerlModel(
    role="actor",
    sections=("actor_rollout_ref.actor.fsdp_config",),
    strategies=("actor_rollout_ref.actor.strategy",),
    model="actor_rollout_ref.model",
    checkpoint="actor_rollout_ref.actor.checkpoint",
    synced=True,
)
REF = VerlModel(
    role="ref",
    sections=("actor_rollout_ref.ref.fsdp_config",),
    strategies=("actor_rollout_ref.ref.strategy", "actor_rollout_ref.actor.strategy"),
    model="actor_rollout_ref.model",
    forward_only=True,
)
CRITIC = VerlModel(
    role="critic",
    sections=("critic.fsdp", "critic.model.fsdp_config"),
    strategies=("critic.strategy",),
    model="critic.model",
    checkpoint="critic.checkpoint",
)
SFT = VerlModel(
    role="model", sections=("engine",), strategies=("engine.strategy",), model="model", checkpoint="checkpoint"
)


def is_ppo(settings: Settings) -> bool:
    """Whether it is of PPO or a relative of it; else it is the SFT trainer's."""
    return any(row.key.startswith(("actor_rollout_ref.", "critic.")) for row in settings)


def built(settings: Settings) -> tuple[list[VerlModel], list[ConfigFinding]]:
    """The models that are built, and a note on each that has settings and is not built."""
    if not is_ppo(settings):
        return [SFT], []
    models, notes = [ACTOR], []
    if settings.flag("algorithm.use_kl_in_reward") or settings.flag("actor_rollout_ref.actor.use_kl_loss"):
        models.append(REF)
    elif settings.below("actor_rollout_ref.ref.fsdp_config"):
        notes.append(note("no reference model is built: neither use_kl_loss nor use_kl_in_reward is true"))
    estimator = settings.first("algorithm.adv_estimator")
    with_critic = settings.flag("critic.enable", default=estimator is None or estimator.value == "gae")
    if with_critic and (settings.below("critic") or estimator):
        models.append(CRITIC)
    elif settings.below("critic") and not with_critic:
        notes.append(note("no critic is built", settings.first("critic.enable") or estimator))
    return models, notes
