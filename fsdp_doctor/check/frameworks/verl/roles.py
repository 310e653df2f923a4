"""The models that verl builds, and where the settings of each stand (trainer/ppo/utils.py, fsdp_sft_trainer.py)."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from fsdp_doctor.check.frameworks.framework import Keys, KeyTable
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
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
    *("use_remove_padding", "use_fused_kernels", "enable_activation_offload", "grad_offload", "mixed_precision"),
    *("cpu_offload", "offload_params", "use_shm", "fsdp_config", "gradient_checkpointing"),
)
_STRATEGIES: dict[str, Strategy] = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


# In the name of a configuration, an engine, or a section: what trains instead of verl's own FSDP. Of these the first
# two are Megatron; the others have FSDP2 of their own, which is not read.
OTHER_ENGINES = ("megatron", "mindspeed", "veomni", "torchtitan", "automodel")
WITHOUT_FSDP = OTHER_ENGINES[:2]
_CHOICES = ("model_engine", "engine", "config_name")
# The names of verl's own configurations, whose defaults are known.
_OWN_CONFIGS = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "ppo_megatron_trainer")
_SCRIPT = f"{LAUNCH}.script"


@dataclass(frozen=True, kw_only=True)
class VerlModel:
    """A model of a run: where its settings stand, in newer and older layouts, and what verl does with it.

    sections: of its FSDP settings. strategies: the keys that decide between FSDP1, FSDP2 and other engines, before
    the one in its sections; default is what they are without. model, checkpoint: the sections of those settings;
    without checkpoint it is never saved. policy: the names in its sections that ask for the policy, all of them
    together. synced: its weights go to the rollout. forward_only: it is under the policy whatever is asked for.
    """

    role: Role
    sections: tuple[str, ...]
    strategies: Keys
    model: str
    default: str = "fsdp"
    path: str = "path"
    checkpoint: str = ""
    policy: tuple[str, ...] = ("offload_policy",)
    synced: bool = False
    forward_only: bool = False

    def keys(self, name: str) -> Keys:
        return tuple(f"{section}.{name}" for section in self.sections)

    @property
    def table(self) -> KeyTable:
        return KeyTable(
            policy=self.keys(self.policy[0]),
            param_offload=self.keys("param_offload"),
            optimizer_offload=self.keys("optimizer_offload"),
            shard_group=self.keys("fsdp_size"),
            lora_rank=(f"{self.model}.lora_rank",),
            path=(f"{self.model}.{self.path}",),
        )

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
        return _STRATEGIES.get(settings.word(*self.strategies, *self.keys("strategy"), default=self.default))

    def under_policy(self, settings: Settings) -> Setting | None:
        """The setting that asks for the policy; None where one of those that must be on is not."""
        asked = all(settings.flag(*self.keys(name)) for name in self.policy)
        return settings.first(*self.keys(self.policy[0])) if asked else None

    def adapter(self, settings: Settings) -> Setting | None:
        """The setting that asks for an adapter: lora_rank, or one to start from; lora.rank is Megatron's."""
        row = settings.first(f"{self.model}.lora_rank")
        if (settings.number(f"{self.model}.lora_rank") or 0) > 0:
            return row
        return settings.first(f"{self.model}.lora_adapter_path")


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
# sft_trainer.py and sft_trainer_ray.py, since v0.6.
SFT = VerlModel(
    role="model", sections=("engine",), strategies=("engine.strategy",), model="model", checkpoint="checkpoint"
)
# fsdp_sft_trainer.py, until v0.7.0; FSDP2 by default since v0.4.
OLD_SFT = VerlModel(
    role="model",
    sections=("model.fsdp_config",),
    strategies=("model.strategy",),
    model="model",
    default="fsdp2",
    path="partial_pretrain",
    checkpoint="trainer.checkpoint",
    policy=("cpu_offload", "offload_params"),
)
MODELS = (ACTOR, REF, CRITIC, SFT, OLD_SFT)


def is_ppo(settings: Settings) -> bool:
    """Whether it is of PPO or a relative of it; else it is an SFT trainer's."""
    critic = any(settings.below(section) for section in CRITIC.sections) or "critic.strategy" in settings
    script = _script(settings)
    return bool(settings.below("actor_rollout_ref")) or critic or ("main_ppo" in script and "verl" in script)


def unknown_config(settings: Settings) -> Setting | None:
    """The setting that names a configuration which is not verl's own and not here, so that its values are not known."""
    path, name = settings.first("config_path", "config_dir"), settings.first("config_name")
    called = str(name.value).removesuffix(".yaml") if name else ""
    given = any(pathlib.PurePath(row.file).stem == called for row in settings)
    own = name is None or given or called in _OWN_CONFIGS
    own_folder = path is None or str(path.value).rstrip("/").endswith(("config", "verl/trainer/config"))
    return None if own and (own_folder or given) else (name if not own else path)


def is_sft(settings: Settings) -> bool:
    of_engine = any(f"engine.{key}" in settings for key in ENGINE_KEYS)
    of_old = "model.partial_pretrain" in settings or (
        bool(settings.below("model.fsdp_config")) and bool(settings.below("trainer"))
    )
    script = _script(settings)
    return of_engine or of_old or ("sft_trainer" in script and "verl" in script)


def another_engine(settings: Settings) -> Setting | None:
    """The setting that has another engine than FSDP train: a choice of Hydra's, or an engine's own section."""
    for row in (settings.first(key) for key in _CHOICES):
        if row is not None and any(name in str(row.value) for name in OTHER_ENGINES):
            return row
    defaults = settings.first("defaults")
    if defaults is not None and any(name in str(defaults.value) for name in OTHER_ENGINES):
        return defaults
    if ACTOR.outer_strategy(settings) is not None or settings.below("actor_rollout_ref.actor.fsdp_config"):
        return None
    sections = (f"actor_rollout_ref.actor.{name}" for name in OTHER_ENGINES)
    return next((rows[0] for section in sections if (rows := settings.below(section))), None)


def built(settings: Settings) -> tuple[VerlModel, ...]:
    """The models of the run, of which some versions may not build all."""
    if is_ppo(settings):
        return (ACTOR, REF, CRITIC) if has_critic(settings) else (ACTOR, REF)
    script = _script(settings)
    old = "fsdp_sft_trainer" in script or "model.partial_pretrain" in settings or settings.below("model.fsdp_config")
    return (OLD_SFT,) if old else (SFT,)


def has_critic(settings: Settings) -> bool:
    estimator = settings.first("algorithm.adv_estimator")
    asked = settings.flag("critic.enable", default=estimator is None or estimator.value == "gae")
    return asked and bool(settings.below("critic") or estimator)


def asks_for_reference(settings: Settings) -> bool:
    return settings.flag("algorithm.use_kl_in_reward") or settings.flag("actor_rollout_ref.actor.use_kl_loss")


def _script(settings: Settings) -> str:
    row = settings.first(_SCRIPT)
    return str(row.value) if row else ""
