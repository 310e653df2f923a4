"""The models that verl builds, where the settings of each are, and the versions of verl that treat a model alike.

Read in trainer/ppo/utils.py, ppo/ray_trainer.py and fsdp_sft_trainer.py; the other sources are in ``verl/__init__``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from dataclasses import dataclass

from packaging.version import Version

from fsdp_doctor.check.frameworks.framework import Keys, KeyTable, VersionRange, get_if_true, matching
from fsdp_doctor.check.launch_commands import SCRIPT
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Role
from fsdp_doctor.matrix.axes import Backend, Strategy

ENGINE_KEYS = ("strategy", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size", "use_orig_params")
_STRATEGIES: dict[str, Strategy] = {"fsdp": Strategy.FSDP1, "fsdp2": Strategy.FSDP2}
# The engines other than verl's own FSDP. The first two are Megatron; the others have an FSDP2 that is not read.
_OTHER_ENGINES = ("megatron", "mindspeed", "veomni", "torchtitan", "automodel")
_WITHOUT_FSDP = _OTHER_ENGINES[:2]
_ENGINE_CHOICES = ("model_engine", "engine", "config_name")
# verl's own configurations, whose defaults are known.
_VERL_CONFIGS = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "ppo_megatron_trainer")


@dataclass(frozen=True, kw_only=True)
class VerlModel:
    """A model of a run: where its settings are, in newer and older layouts, and what verl does with it.

    sections: of its FSDP settings. strategies: the keys that decide between FSDP1, FSDP2 and other engines, before
    the one in its sections; default is what they are without. model, checkpoint: the sections of those settings;
    without checkpoint it is never saved. policy: the names in its sections that ask for the policy, all of them
    together. synced: its weights go to the rollout. forward_only: it is under the policy whatever is asked for.
    old_sft: it is trained by fsdp_sft_trainer.py, which was removed after v0.7.0.
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
    old_sft: bool = False

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

    def strategy_setting(self, settings: Settings) -> Setting | None:
        return settings.first(*self.strategies, *self.keys("strategy"))

    def strategy(self, settings: Settings) -> Strategy | None:
        """FSDP1 or FSDP2, regardless of use_orig_params; None for another engine."""
        return _STRATEGIES.get(settings.word(*self.strategies, *self.keys("strategy"), default=self.default))

    def policy_setting(self, settings: Settings) -> Setting | None:
        """The setting that asks for the policy; None where one of those that must be on is not."""
        asked = all(settings.flag(*self.keys(name)) for name in self.policy)
        return settings.first(*self.keys(self.policy[0])) if asked else None

    def manual_offloads(self, settings: Settings) -> dict[str, Setting]:
        """By name, the manual offloads that are on."""
        rows = {name: get_if_true(settings, *self.keys(name)) for name in ("param_offload", "optimizer_offload")}
        return {name: row for name, row in rows.items() if row}

    def adapter(self, settings: Settings) -> Setting | None:
        """The setting that asks for an adapter: lora_rank, or one to start from; lora.rank is Megatron's."""
        if (settings.number(f"{self.model}.lora_rank") or 0) > 0:
            return settings.first(f"{self.model}.lora_rank")
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
    old_sft=True,
)
MODELS = (ACTOR, REF, CRITIC, SFT, OLD_SFT)


@dataclass(frozen=True)
class VerlVersions(VersionRange):
    """A range of versions, of one implementation of the workers.

    engine: whether the engine runs the model, rather than fsdp_workers.py.
    own_strategy: the engine follows the strategy in the model's section alone, by default ``fsdp`` (until PR 5885).
    stages: it stages before each sync, whatever the offload. stages_policy: under CPUOffloadPolicy too.
    stages_fsdp2: an FSDP2 model without adapters too.
    saves_policy_staged: a checkpoint under the policy is taken from a module that was moved.
    saves_whole: the old SFT trainer saves the whole model, not its shards.
    reads_after_offload: the state dict is read after the module was offloaded again.
    merged_late: a merged adapter is read after the merge was undone.
    nonblocking: FSDP2 shards are offloaded without waiting for the copies.
    asks_offloaded: fully asynchronous training asks an offloaded model for its names and shapes (issue 4657).
    backend, critic_backend: of the process group, and of the critic's own.
    always_ref: a reference model is built whether anything asks for one or not.
    fsdp1_only: FSDP2 and LoRA are not known yet.
    """

    engine: bool = True
    own_strategy: bool = False
    stages: bool = True
    stages_policy: bool = False
    stages_fsdp2: bool = True
    saves_policy_staged: bool = False
    saves_whole: bool = False
    reads_after_offload: bool = True
    merged_late: bool = True
    nonblocking: bool = False
    asks_offloaded: bool = False
    backend: Backend = Backend.MIXED
    critic_backend: Backend = Backend.MIXED
    always_ref: bool = False
    fsdp1_only: bool = False


_LEGACY = VerlVersions(
    "v0.4 to v0.7, use_legacy_worker_impl=auto or enable",
    ">=0.4,<0.8",
    engine=False,
    stages=False,
    asks_offloaded=True,
    critic_backend=Backend.DEVICE_ONLY,
)
_V0_3 = dataclasses.replace(
    _LEGACY, label="v0.3", versions=">=0.3,<0.4", asks_offloaded=False, always_ref=True, fsdp1_only=True
)
_V0_2 = dataclasses.replace(_V0_3, label="before v0.3", versions="<0.3", backend=Backend.DEVICE_ONLY)
_FIRST_ENGINE = VerlVersions(
    "v0.6 and v0.7, use_legacy_worker_impl=disable",
    ">=0.6,<0.8",
    own_strategy=True,
    stages_policy=True,
    saves_policy_staged=True,
)
_V0_8 = VerlVersions("v0.8", ">=0.8,<0.9", saves_policy_staged=True)  # PR 6463
_V0_9 = VerlVersions(  # PRs 6604, 7005, 7014
    "v0.9.0", ">=0.9,<0.9.1", stages_fsdp2=False, reads_after_offload=False, merged_late=False
)
_NEWEST = dataclasses.replace(_V0_9, label="after v0.9.0", versions=">=0.9.1", nonblocking=True)  # PR 7347
RELEASES = (_V0_2, _V0_3, _LEGACY, _FIRST_ENGINE, _V0_8, _V0_9, _NEWEST)
# fsdp_sft_trainer.py, which has NCCL alone.
_OLD_SFT_V0_5 = VerlVersions("v0.5 to v0.7.0", ">=0.5,<0.8", backend=Backend.DEVICE_ONLY, stages=False)
_OLD_SFT_V0_4 = dataclasses.replace(_OLD_SFT_V0_5, label="v0.4", versions=">=0.4,<0.5", saves_whole=True)
OLD_SFT_RELEASES = (
    dataclasses.replace(_OLD_SFT_V0_4, label="before v0.4", versions="<0.4", fsdp1_only=True),
    _OLD_SFT_V0_4,
    _OLD_SFT_V0_5,
)


def versions_of(model: VerlModel, settings: Settings, version: Version | None) -> list[VerlVersions]:
    """The ranges of versions that build the model: by the version, and by the implementation that is chosen."""
    if model.old_sft:
        return [item for item in matching(OLD_SFT_RELEASES, version) if _understands(item, model, settings)]
    releases = matching(RELEASES, version)
    if model is SFT:  # It has the engine alone, and no setting that chooses.
        return [
            dataclasses.replace(
                item, backend=Backend.DEVICE_ONLY, label="v0.6 and v0.7" if item is _FIRST_ENGINE else item.label
            )
            for item in releases
            if item.engine
        ]
    implementation = settings.word("trainer.use_legacy_worker_impl")
    excluded = {"disable": _LEGACY, "enable": _FIRST_ENGINE, "auto": _FIRST_ENGINE}.get(implementation)
    releases = [item for item in releases if item is not excluded and _understands(item, model, settings)]
    if model is REF:
        # With an adapter the actor without it is the reference: ``ref_in_actor``.
        is_asked = asks_for_reference(settings) and model.adapter(settings) is None
        return [item for item in releases if item.always_ref or is_asked]
    return releases


def _understands(versions: VerlVersions, model: VerlModel, settings: Settings) -> bool:
    """Whether those versions know what the settings ask for."""
    asks_fsdp2 = model.strategy_setting(settings) is not None and model.strategy(settings) == "fsdp2"
    asks_adapter = not model.old_sft and model.adapter(settings) is not None
    is_newer = "trainer.use_legacy_worker_impl" in settings or bool(settings.below("critic.fsdp"))
    return not (versions.fsdp1_only and (asks_fsdp2 or asks_adapter or is_newer))


def is_ppo(settings: Settings) -> bool:
    """Whether the run is of PPO or a relative of it."""
    critic = any(settings.below(section) for section in CRITIC.sections) or "critic.strategy" in settings
    script = settings.text(SCRIPT)
    return bool(settings.below("actor_rollout_ref")) or critic or ("main_ppo" in script and "verl" in script)


def is_sft(settings: Settings) -> bool:
    has_engine = any(f"engine.{key}" in settings for key in ENGINE_KEYS)
    is_old = "model.partial_pretrain" in settings or (
        bool(settings.below("model.fsdp_config")) and bool(settings.below("trainer"))
    )
    script = settings.text(SCRIPT)
    return has_engine or is_old or ("sft_trainer" in script and "verl" in script)


def built_models(settings: Settings) -> tuple[VerlModel, ...]:
    """The models of the run; some versions may not build all of them."""
    if is_ppo(settings):
        return (ACTOR, REF, CRITIC) if has_critic(settings) else (ACTOR, REF)
    is_old = "fsdp_sft_trainer" in settings.text(SCRIPT) or "model.partial_pretrain" in settings
    return (OLD_SFT,) if is_old or settings.below("model.fsdp_config") else (SFT,)


def has_critic(settings: Settings) -> bool:
    estimator = settings.first("algorithm.adv_estimator")
    is_enabled = settings.flag("critic.enable", default=estimator is None or estimator.value == "gae")
    return is_enabled and bool(settings.below("critic") or estimator)


def asks_for_reference(settings: Settings) -> bool:
    return settings.flag("algorithm.use_kl_in_reward") or settings.flag("actor_rollout_ref.actor.use_kl_loss")


def unknown_config(settings: Settings) -> Setting | None:
    """The setting that names a configuration which is neither verl's own nor given, so that its values are unknown."""
    path, name = settings.first("config_path", "config_dir"), settings.first("config_name")
    stem = str(name.value).removesuffix(".yaml") if name else ""
    if any(pathlib.PurePath(row.file).stem == stem for row in settings):
        return None
    if name is not None and stem not in _VERL_CONFIGS:
        return name
    is_verl_folder = path is None or str(path.value).rstrip("/").endswith("config")
    return None if is_verl_folder else path


def other_engine(settings: Settings) -> Setting | None:
    """The setting that chooses another engine than FSDP: one of Hydra's choices, or an engine's own section."""
    for row in (settings.first(key) for key in (*_ENGINE_CHOICES, "defaults")):
        if row is not None and names_engine(str(row.value)):
            return row
    if ACTOR.outer_strategy(settings) is not None or settings.below("actor_rollout_ref.actor.fsdp_config"):
        return None
    sections = (settings.below(f"actor_rollout_ref.actor.{name}") for name in _OTHER_ENGINES)
    return next((rows[0] for rows in sections if rows), None)


def names_engine(text: str) -> bool:
    """Whether a name or a key has one of the other engines as one of its words, as ``ppo_megatron_trainer`` has."""
    return not _words(text).isdisjoint(_OTHER_ENGINES)


def has_no_fsdp(engine: Setting) -> bool:
    """Whether the engine that a setting chooses never trains with FSDP."""
    return not _words(f"{engine.key} {engine.value}").isdisjoint(_WITHOUT_FSDP)


def _words(text: str) -> set[str]:
    return set(re.split(r"[^A-Za-z0-9]+", text))
