"""verl: PPO and its variants (actor, ref, critic), and the SFT trainers.

Sources read in verl v0.2.0.post2, v0.3.0.post1, v0.4.0 to v0.9.0 and main of August 2026: trainer/config/*.yaml for the
defaults; trainer/fsdp_sft_trainer.py (until v0.7.0), sft_trainer.py, workers/fsdp_workers.py (removed by PR 6067) and
workers/engine/fsdp/transformer_impl.py for offloads and extractions; utils/fsdp_utils.py for how offloads are done;
utils/checkpoint/fsdp_checkpoint_manager.py for checkpoints; trainer/main_ppo.py, trainer/ppo/utils.py and
ppo/ray_trainer.py for which models are built.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from fsdp_doctor.check.findings import ConfigFinding, note, report_conflict, report_known, report_unknown
from fsdp_doctor.check.framework import (
    FsdpFramework,
    Keys,
    KeyTable,
    ModelReading,
    VersionRange,
    load_facts,
    report_not_under_fsdp,
    select_matching,
    trains_with_fsdp,
)
from fsdp_doctor.check.launch_commands import SCRIPT
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import (
    Chosen,
    ExtractionPoint,
    OffloadChoice,
    Role,
    make_extraction_point,
    make_loading_point,
)
from fsdp_doctor.matrix.axes import AxisName, Backend, Model, Strategy, Transfer
from fsdp_doctor.matrix.cases import Scenario

_Trainer: TypeAlias = Literal["ppo", "sft", "old_sft"]

_STRATEGIES: dict[str, Strategy] = {"fsdp": Strategy.FSDP1, "fsdp2": Strategy.FSDP2}
# Engines other than verl's own FSDP: those without FSDP, and those whose FSDP is not checked.
_WITHOUT_FSDP = ("megatron", "mindspeed", "mindspeedllm", "deepspeed")
_OTHER_ENGINES = (*_WITHOUT_FSDP, "veomni", "torchtitan", "automodel", "hyperparallel", "fsdp_turbo")
# Names of verl's FSDP, both as Hydra choices and as strategies.
_WITH_FSDP = ("fsdp", "fsdp2", "dp")
_ENGINE_KEYS = ("strategy", "param_offload", "optimizer_offload", "offload_policy", "fsdp_size", "use_orig_params")
# verl's own configurations, whose defaults are known.
_VERL_CONFIGS = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "ppo_megatron_trainer")
_OFFLOADS = ("offload_policy", "param_offload", "optimizer_offload")
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
_IMPLEMENTATION = "trainer.use_legacy_worker_impl"
# Other names that verl's PrecisionType accepts for dtypes.
_DTYPES = {"fp16": "float16", "16": "float16", "bf16": "bfloat16", "fp32": "float32", "32": "float32"}


class VerlModel(KeyTable, frozen=True, kw_only=True):
    """Model of a run: the keys of its settings, in newer and older layouts, and how verl uses the model.

    ``strategies`` are keys outside the model's sections that choose FSDP1, FSDP2 or another engine. These keys take
    precedence over the key in the model's sections; ``default`` applies if no key is set. ``model`` and ``checkpoint``
    are the sections with model and checkpoint settings; without ``checkpoint`` the model is never saved.
    ``policy_names`` are names in the model's sections that must all be true for the offload policy. ``synced`` models
    send their weights to the rollout. ``forward_only`` models always use the policy.
    """

    role: Role
    strategies: Keys
    model: str
    default: str = "fsdp"
    checkpoint: str = ""
    policy_names: tuple[str, ...] = ("offload_policy",)
    synced: bool = False
    forward_only: bool = False

    def name_keys(self, name: str) -> Keys:
        """Returns the keys with this name in the model's sections."""
        return tuple(f"{section}.{name}" for section in self.sections)

    def find_outer_strategy(self, settings: Settings) -> Setting | None:
        """Finds the strategy setting outside the model's sections, which the trainer reads; None if not set."""
        return settings.find_first(*self.strategies)

    def find_inner_strategy(self, settings: Settings) -> Setting | None:
        """Finds the strategy setting in the model's sections, which the engine read until PR 5885; None if not set."""
        return settings.find_first(*self.name_keys("strategy"))

    def find_strategy_setting(self, settings: Settings) -> Setting | None:
        return self.find_outer_strategy(settings) or self.find_inner_strategy(settings)

    def read_strategy(self, settings: Settings) -> Strategy | None:
        """Reads whether the model uses FSDP1 or FSDP2, regardless of use_orig_params; None for another engine."""
        return _STRATEGIES.get(settings.read_word(*self.strategies, *self.name_keys("strategy"), default=self.default))

    def find_policy_setting(self, settings: Settings) -> Setting | None:
        """Finds the setting that turns on the offload policy; None unless all of the policy's settings are true."""
        is_asked = all(settings.read_flag(*self.name_keys(name)) for name in self.policy_names)
        return settings.find_first(*self.name_keys(self.policy_names[0])) if is_asked else None

    def find_manual_offloads(self, settings: Settings) -> dict[str, Setting]:
        """Returns, by name, the settings of the manual offloads that are on."""
        rows = {
            name: settings.find_first_true(*self.name_keys(name)) for name in ("param_offload", "optimizer_offload")
        }
        return {name: row for name, row in rows.items() if row}

    def find_adapter(self, settings: Settings) -> Setting | None:
        """Finds the setting that asks for an adapter, ``lora_rank`` or an adapter's path; None if there is none.

        ``lora.rank`` is not considered, since only Megatron reads it.
        """
        if (settings.read_number(f"{self.model}.lora_rank") or 0) > 0:
            return settings.find_first(f"{self.model}.lora_rank")
        return settings.find_first(f"{self.model}.lora_adapter_path")


class VerlVersions(VersionRange, frozen=True, kw_only=True):
    """Range of versions with one implementation of the workers.

    trainers: the trainers that have these versions.
    chosen_by: values of use_legacy_worker_impl that choose this implementation; empty if every value does.
    engine: the engine runs the model instead of fsdp_workers.py.
    own_strategy: the engine reads only the strategy in the model's section, by default ``fsdp`` (until PR 5885).
    stages: the model is moved to the device before each sync, whatever the offload.
    stages_policy: the model is also moved under CPUOffloadPolicy.
    stages_fsdp2: the model is also moved if it is an FSDP2 model without adapters.
    saves_policy_staged: under the policy, a checkpoint is taken after the module was moved to the device.
    saves_whole: the old SFT trainer saves the whole model instead of its shards.
    reads_after_offload: the state dict is read after the module was offloaded again.
    merged_late: a merged adapter is read after the merge was undone.
    nonblocking: FSDP2 shards are offloaded without waiting for the copies.
    asks_offloaded: fully asynchronous training reads names and shapes from an offloaded model (issue 4657).
    backend: the backend of PPO's process group.
    critic_backend: the backend of the critic's separate group.
    always_ref: a reference model is built even if no setting asks for a reference model.
    fsdp1_only: these versions do not support FSDP2 and LoRA yet.
    """

    trainers: tuple[_Trainer, ...]
    chosen_by: tuple[str, ...] = ()
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


_FACTS = load_facts("verl", VerlVersions, VerlModel)
_ACTOR, _REF, _CRITIC, _SFT, _OLD_SFT = (_FACTS.models[name] for name in ("actor", "ref", "critic", "sft", "old_sft"))


class Verl(FsdpFramework[VerlVersions]):
    facts = _FACTS

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        if _is_ppo(settings):
            return True
        has_engine = any(f"engine.{key}" in settings for key in _ENGINE_KEYS)
        has_section = bool(settings.list_below("model.fsdp_config") and settings.list_below("trainer"))
        script = settings.read_text(SCRIPT)
        is_script = "sft_trainer" in script and "verl" in script
        return has_engine or "model.partial_pretrain" in settings or has_section or is_script

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        """Returns the number of ranks, by default eight for PPO; None for SFT if only torchrun gives the number."""
        per_node = settings.read_number("trainer.n_gpus_per_node", default=8 if _is_ppo(settings) else None)
        nodes = settings.read_number("trainer.nnodes", default=1)
        return per_node * nodes if per_node and nodes else None

    def list_models(self) -> dict[Role, tuple[str, ...]]:
        if engine := _find_other_engine(self.settings):
            if _split_words(f"{engine.key} {engine.value}").isdisjoint(_WITHOUT_FSDP):
                raise Unreadable(f"{engine}: this engine is not known, or has its own FSDP, which is not checked")
            return {"actor" if _is_ppo(self.settings) else "model": ()}
        if config := _find_unknown_config(self.settings):
            raise Unreadable(
                f"{config}: the settings of that configuration are not known; give its file as another argument"
            )
        models = _list_built_models(self.settings)
        return {model.role: model.sections for model in models if model is not _REF or self._list_ranges(model)}

    def list_keys(self, role: Role) -> VerlModel:
        return next(model for model in _list_built_models(self.settings) if model.role == role)

    def read(self, role: Role) -> ModelReading:
        if engine := _find_other_engine(self.settings):
            return report_not_under_fsdp(role, engine)
        model = self.list_keys(role)
        ranges = self._list_ranges(model)
        strategy = model.read_strategy(self.settings)
        if strategy is None and (row := model.find_strategy_setting(self.settings)):
            trains_with_fsdp(row, (), _WITHOUT_FSDP)
            return report_not_under_fsdp(role, row, *self._find_offload_conflicts(model, strategy))
        assert strategy is not None
        if not ranges:
            raise Unreadable("this version of verl does not support these settings")
        if all(versions.fsdp1_only for versions in ranges):
            strategy = Strategy.FSDP1
        findings = [
            *self._find_offload_conflicts(model, strategy),
            *self._find_double_load(model, ranges),
            *self._find_useless_offload(model, strategy),
            *self._find_ignored_strategy(model, ranges),
        ]
        return self.read_role(role, findings, ranges)

    def choose_axes(self, role: Role, versions: VerlVersions) -> dict[AxisName, Chosen]:
        model = self.list_keys(role)
        strategy = Strategy.FSDP1 if versions.fsdp1_only else model.read_strategy(self.settings) or Strategy.FSDP1
        offload, adapter = self._choose_offloads(model, strategy), model.find_adapter(self.settings)
        row, orig = model.find_strategy_setting(self.settings), model.name_keys("use_orig_params")
        why = "before v0.4 verl has only FSDP1" if versions.fsdp1_only else str(row or "verl's default")
        chosen = Chosen(strategy, why)
        if strategy.version == 1 and self.settings.read_flag(*orig):
            chosen = Chosen(Strategy.FSDP1_ORIG, f"{why}; {self.settings.find_first(*orig)}")
        return {
            "strategy": chosen,
            "offload": offload.chosen,
            "model": Chosen(Model.QWEN3_LORA, adapter) if adapter else Chosen(Model.QWEN3),
            "sharding": self.choose_sharding(role),
            "backend": _choose_backend(model, versions),
            "transfer": _choose_transfer(strategy, offload, versions),
        }

    def list_extractions(self, role: Role, versions: VerlVersions, scenario: Scenario) -> Iterator[ExtractionPoint]:
        """Lists the weight sync to the rollout, and the checkpoints."""
        model = self.list_keys(role)
        if model.synced:
            staged = _sync_is_staged(versions, scenario)
            method = self._choose_sync_method(versions, scenario, staged)
            yield make_extraction_point("weights for the rollout", scenario, method, staged=staged)
            if versions.asks_offloaded and self.settings.list_below("async_training"):
                yield make_extraction_point("get_actor_weights_info for the rollout", scenario, "weights_info")
        # PPO saves every ``save_freq`` steps if this is positive, which it is not by default. SFT saves at the end.
        saves = role == "model" or (self.settings.read_number("trainer.save_freq") or -1) > 0
        if model.checkpoint and saves:
            yield from self._list_checkpoints(model, versions, scenario)

    def find_problems(self) -> Iterator[ConfigFinding]:
        yield from self._find_misplaced_offloads()
        script = self.settings.read_text(SCRIPT)
        module = re.fullmatch(r"(\w+)(?:\.\w+)+", script)
        # A package that has verl's settings but is not verl may be a copy of it with different workers.
        if module is not None and module[1] not in ("verl", "recipe") and not script.endswith((".py", ".sh")):
            sentence = (
                f"{module[1]} is not verl's own package: the findings here hold if its workers are verl's workers"
            )
            yield note(sentence, self.settings.find_first(SCRIPT))
        if _is_ppo(self.settings) and not _find_other_engine(self.settings):
            yield from self._find_models_not_built()
        if self.settings.find_first("defaults"):
            yield note("Hydra's `defaults` are not followed; verl's own defaults are assumed")

    # Versions and axes

    def _list_ranges(self, model: VerlModel) -> list[VerlVersions]:
        """Lists the version ranges in which verl builds the model, for the given version and implementation."""
        trainer: _Trainer = "old_sft" if model is _OLD_SFT else "sft" if model is _SFT else "ppo"
        ranges = [item for item in select_matching(_FACTS.versions, self.version) if trainer in item.trainers]
        if trainer == "sft":
            return ranges
        # A given version has a default implementation; without a version, either may run.
        word = self.settings.read_word(_IMPLEMENTATION) or ("auto" if self.version is not None else "")
        if trainer == "ppo" and word in ("auto", "enable", "disable"):
            ranges = [item for item in ranges if not item.chosen_by or word in item.chosen_by]
        ranges = [item for item in ranges if not item.fsdp1_only or not self._asks_for_newer(model)]
        # With an adapter, the actor without it serves as the reference (``ref_in_actor``).
        is_asked = _asks_for_reference(self.settings) and model.find_adapter(self.settings) is None
        return [item for item in ranges if model is not _REF or item.always_ref or is_asked]

    def _asks_for_newer(self, model: VerlModel) -> bool:
        """Returns whether the settings use features of v0.4 and newer: FSDP2, adapters, the newer layouts."""
        asks_fsdp2 = (
            model.find_strategy_setting(self.settings) is not None
            and model.read_strategy(self.settings) is Strategy.FSDP2
        )
        asks_adapter = model is not _OLD_SFT and model.find_adapter(self.settings) is not None
        return (
            asks_fsdp2
            or asks_adapter
            or _IMPLEMENTATION in self.settings
            or bool(self.settings.list_below("critic.fsdp"))
        )

    def _choose_offloads(self, model: VerlModel, strategy: Strategy) -> OffloadChoice:
        """Chooses the offloads. Only FSDP2 reads the policy, except that the old SFT trainer reads it for FSDP1."""
        if model.forward_only:
            return OffloadChoice(
                policy="verl uses the offload policy for a model that only runs forward, whatever its flags say"
            )
        reads_policy = strategy.version == (1 if model is _OLD_SFT else 2)
        manual = model.find_manual_offloads(self.settings)
        return OffloadChoice(
            policy=model.find_policy_setting(self.settings) if reads_policy else None,
            param=manual.get("param_offload"),
            optimizer=manual.get("optimizer_offload"),
            default="verl's default",
        )

    # Extractions

    def _choose_sync_method(self, versions: VerlVersions, scenario: Scenario, staged: bool) -> str:
        if scenario.model.has_adapters:
            if versions.stages and self.settings.read_flag("actor_rollout_ref.model.lora.merge"):
                is_late = versions.merged_late and scenario.version == 2
                return "lora.merged.read_late" if is_late else "lora.merged"
            is_layered = self.settings.read_flag("actor_rollout_ref.rollout.layered_summon")
            return "lora.layered_summon" if is_layered else "lora.adapter"
        if scenario.version == 1:
            load_format = "" if versions.engine else self.settings.read_word("actor_rollout_ref.rollout.load_format")
            return "full_state_dict" if "hf" in load_format.split("_") else "sharded_state_dict.full_tensor"
        is_late = versions.reads_after_offload and staged and scenario.param_offload
        return "state_dict.held" if is_late else "state_dict.to.full_tensor"

    def _list_checkpoints(
        self, model: VerlModel, versions: VerlVersions, scenario: Scenario
    ) -> Iterator[ExtractionPoint]:
        """Lists save_checkpoint's sharded state dict, the whole model if ``hf_model`` asks for it, and the resume."""
        is_fsdp2 = scenario.version == 2
        whole = "get_model_state_dict.full+cpu" if is_fsdp2 else "full_state_dict.rank0+cpu"
        if versions.saves_whole:
            yield make_extraction_point("checkpoint", scenario, whole)
            return
        staged = scenario.param_offload or (scenario.policy and is_fsdp2 and versions.saves_policy_staged)
        row = self.settings.find_first(f"{model.checkpoint}.save_contents")
        contents = row.value if row and isinstance(row.value, list) else ["model"]
        methods = {"model": "state_dict" if is_fsdp2 else "sharded_state_dict", "hf_model": whole}
        for name, method in methods.items():
            if name in contents:
                yield make_extraction_point("checkpoint", scenario, method, staged=staged)
        # FSDPCheckpointManager.load_checkpoint, after load_fsdp_model_to_gpu if param_offload is on.
        yield make_loading_point("resume", scenario, "rank_files.model+optimizer", staged=scenario.param_offload)

    # Settings that contradict each other, that nothing reads, or that are harmful together

    def _find_offload_conflicts(self, model: VerlModel, strategy: Strategy | None) -> Iterator[ConfigFinding]:
        """Finds conflicts between the strategy and the offloads. ``strategy`` is None for an engine other than FSDP."""
        settings, role = self.settings, model.role
        policy, row = model.find_policy_setting(settings), model.find_strategy_setting(settings)
        if model is _OLD_SFT:
            if policy and strategy is Strategy.FSDP2:
                sentence = (
                    "since v0.4 the SFT trainer passes FSDP1's offload to FSDP2, which leaves the shards on the CPU"
                )
                yield report_conflict(sentence, policy, row)
            return
        inner, outer = model.find_inner_strategy(settings), model.find_outer_strategy(settings)
        if inner and outer and inner.value != outer.value and inner.key != outer.key:
            sentence = (
                f"{role}: two different strategies are set: since PR 5885 (v0.8.0) the engine follows the first, "
                "before this PR the second"
            )
            yield report_conflict(sentence, outer, inner)
        manual = list(model.find_manual_offloads(settings).values())
        if model.forward_only:
            if policy or manual:
                yield note(
                    f"{role}: verl uses the offload policy for this model, whatever these settings say", policy, *manual
                )
        elif policy and strategy is Strategy.FSDP1:
            yield report_conflict(
                f"{role}: offload_policy has no effect with FSDP1; only strategy=fsdp2 reads it", policy, row
            )
        elif policy and strategy is Strategy.FSDP2 and manual:
            sentence = f"{role}: the policy and a manual offload are both on; the policy takes precedence"
            yield report_conflict(sentence, policy, *manual)
        if strategy is Strategy.FSDP2 and (orig := settings.find_first_true(*model.name_keys("use_orig_params"))):
            yield note(f"{role}: FSDP2 does not read use_orig_params", orig)

    def _find_ignored_strategy(self, model: VerlModel, ranges: Sequence[VerlVersions]) -> Iterator[ConfigFinding]:
        """Notes that until PR 5885 the engine read only the strategy in the model's section, by default ``fsdp``."""
        outer, inner = model.find_outer_strategy(self.settings), model.find_inner_strategy(self.settings)
        if any(item.own_strategy for item in ranges) and outer and outer.value != "fsdp" and not inner:
            sentence = "an engine before PR 5885, as in v0.7.1, uses FSDP1 unless fsdp_config.strategy is set"
            yield note(f"{model.role}: {sentence}", outer)

    def _find_double_load(self, model: VerlModel, ranges: Sequence[VerlVersions]) -> Iterator[ConfigFinding]:
        """Finds workers that only generate, but also load the FSDP model next to the engine's own weights
        (issue 4229).
        """
        settings = self.settings
        legacy = tuple(f"{model.role}, {item.label}" for item in ranges if not item.engine)
        rows, size = settings.list_below("async_training"), model.name_keys("fsdp_size")
        if not (model.synced and legacy and rows) or settings.read_number(*size) != 1:
            return
        if settings.read_flag(*model.name_keys("param_offload")):
            return
        share = settings.find_first(_UTILIZATION)
        memory = f"{share.value} of the device's memory" if share else "its share of the device's memory"
        sentence = (
            f"{model.role}: a worker that only generates also loads this FSDP model, and with fsdp_size=1 the "
            f"whole model: it is on the device next to the engine's own weights when the engine asks for {memory} "
            "(issue 4229); `fsdp-doctor memory plan` shows how much"
        )
        yield dataclasses.replace(
            report_conflict(sentence, settings.find_first(*size), share, rows[0]), holds_for=legacy
        )

    def _find_useless_offload(self, model: VerlModel, strategy: Strategy) -> Iterator[ConfigFinding]:
        """Finds an offload of unsharded FSDP1 parameters that are stored in the compute dtype."""
        settings = self.settings
        moved = settings.find_first_true(*model.name_keys("param_offload"))
        if strategy.version == 2 or moved is None or model.forward_only or model is _OLD_SFT:
            return
        if self.read_model(model.role).ranks != 1:
            return
        stored = settings.find_first(*model.name_keys("model_dtype"))
        computed = settings.find_first(*model.name_keys("mixed_precision.param_dtype"), *model.name_keys("dtype"))
        if _read_dtype(stored, "float32") == _read_dtype(computed, "bfloat16"):
            size = settings.find_first(*model.name_keys("fsdp_size"))
            yield report_known("fsdp1-no-shard-offload-frees-nothing", moved, size, stored, computed)

    def _find_misplaced_offloads(self) -> Iterator[ConfigFinding]:
        """Finds offloads in sections where verl's FSDP does not read offloads."""
        sections = [section for model in _FACTS.models.values() for section in model.sections]
        for row in self.settings:
            section = row.key.rpartition(".")[0]
            if row.name not in _OFFLOADS or section in sections or _names_other_engine(section):
                continue
            if section.startswith(("actor_rollout_ref", "critic", "engine")):
                (near,) = difflib.get_close_matches(section, sections, n=1, cutoff=0)
                sentence = f"verl's FSDP does not read {row.name} in {section} (did you mean {near}.{row.name}?)"
                yield report_unknown(sentence, row)

    def _find_models_not_built(self) -> Iterator[ConfigFinding]:
        """Makes a note for each model that has settings but is not built."""
        settings, adapter = self.settings, _REF.find_adapter(self.settings)
        if adapter and _asks_for_reference(settings):
            sentence = (
                "no reference model is built: with an adapter, the actor without the adapter is the reference "
                "(ref_in_actor)"
            )
            yield note(sentence, adapter)
        elif settings.list_below(_REF.sections[0]) and not _asks_for_reference(settings):
            yield note("no reference model is built since v0.4: neither use_kl_loss nor use_kl_in_reward is true")
        if settings.list_below("critic") and not _has_critic(settings):
            yield note("no critic is built", settings.find_first("critic.enable", "algorithm.adv_estimator"))


def _choose_backend(model: VerlModel, versions: VerlVersions) -> Chosen:
    if model is _CRITIC and not versions.critic_backend.has_cpu_collectives:
        return Chosen(versions.critic_backend, "verl/workers/fsdp_workers.py gives the critic's own process only NCCL")
    if model is _SFT or not versions.backend.has_cpu_collectives:
        return Chosen(Backend.DEVICE_ONLY, "verl makes this process group with only NCCL")
    return Chosen(Backend.MIXED)


def _choose_transfer(strategy: Strategy, offload: OffloadChoice, versions: VerlVersions) -> Chosen:
    """Chooses non-blocking copies for the manual offload of FSDP1's parameters, or of the optimizer state alone.

    Since PR 7347, the manual offload of FSDP2's parameters is non-blocking, too. All other copies are blocking.
    """
    moves_optimizer_alone = offload.optimizer and not offload.param
    moves_so = moves_optimizer_alone or (offload.param and (strategy.version == 1 or versions.nonblocking))
    if not moves_so or offload.policy:
        return Chosen(Transfer.BLOCKING)
    return Chosen(Transfer.NONBLOCKING, "verl/utils/fsdp_utils.py offloads with non_blocking=True")


def _sync_is_staged(versions: VerlVersions, scenario: Scenario) -> bool:
    """Returns whether the model is moved to the device before its weights are sent to the rollout.

    The move is in the engine's get_per_tensor_param or in the worker's rollout_mode.
    """
    if scenario.policy:
        return versions.stages_policy
    if not versions.stages:
        return scenario.param_offload
    return scenario.version == 1 or scenario.model.has_adapters or versions.stages_fsdp2


def _read_dtype(row: Setting | None, default: str) -> str:
    word = str(row.value) if row else default
    return _DTYPES.get(word, word)


def _is_ppo(settings: Settings) -> bool:
    """Returns whether the run trains with PPO or a variant of it."""
    has_critic = any(settings.list_below(section) for section in _CRITIC.sections) or "critic.strategy" in settings
    script = settings.read_text(SCRIPT)
    return bool(settings.list_below("actor_rollout_ref")) or has_critic or ("main_ppo" in script and "verl" in script)


def _list_built_models(settings: Settings) -> tuple[VerlModel, ...]:
    """Lists the models of the run; some versions may not build all of them."""
    if _is_ppo(settings):
        return (_ACTOR, _REF, _CRITIC) if _has_critic(settings) else (_ACTOR, _REF)
    is_old = "fsdp_sft_trainer" in settings.read_text(SCRIPT) or "model.partial_pretrain" in settings
    return (_OLD_SFT,) if is_old or settings.list_below("model.fsdp_config") else (_SFT,)


def _has_critic(settings: Settings) -> bool:
    estimator = settings.find_first("algorithm.adv_estimator")
    is_enabled = settings.read_flag("critic.enable", default=estimator is None or estimator.value == "gae")
    return is_enabled and bool(settings.list_below("critic") or estimator)


def _asks_for_reference(settings: Settings) -> bool:
    return settings.read_flag("algorithm.use_kl_in_reward") or settings.read_flag("actor_rollout_ref.actor.use_kl_loss")


def _find_unknown_config(settings: Settings) -> Setting | None:
    """Finds a setting that names a configuration whose values are unknown; None if there is none.

    The values of verl's own configurations and of the given files are known.
    """
    path, name = settings.find_first("config_path", "config_dir"), settings.find_first("config_name")
    stem = str(name.value).removesuffix(".yaml") if name else ""
    if any(pathlib.PurePath(row.file).stem == stem for row in settings):
        return None
    if name is not None and stem not in _VERL_CONFIGS:
        return name
    is_verl_folder = path is None or str(path.value).rstrip("/").endswith("config")
    return None if is_verl_folder else path


def _find_other_engine(settings: Settings) -> Setting | None:
    """Finds the setting that chooses an engine other than FSDP: a Hydra choice, or a section of that engine.

    Returns None if no setting chooses another engine.
    """
    for row in map(settings.find_first, ("model_engine", "engine")):
        if row is not None and isinstance(row.value, str) and row.value not in _WITH_FSDP:
            return row
    for row in map(settings.find_first, ("config_name", "defaults")):
        if row is not None and _names_other_engine(str(row.value)):
            return row
    if _ACTOR.find_outer_strategy(settings) is not None or settings.list_below("actor_rollout_ref.actor.fsdp_config"):
        return None
    sections = (settings.list_below(f"actor_rollout_ref.actor.{name}") for name in _OTHER_ENGINES)
    return next((rows[0] for rows in sections if rows), None)


def _names_other_engine(text: str) -> bool:
    """Returns whether a name or key contains the name of another engine as a word, as in ``ppo_megatron_trainer``."""
    return not _split_words(text).isdisjoint(_OTHER_ENGINES)


def _split_words(text: str) -> set[str]:
    return set(re.split(r"[^A-Za-z0-9]+", text)) | set(re.split(r"[^A-Za-z0-9_]+", text))
