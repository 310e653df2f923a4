"""verl: PPO and its relatives (actor, ref, critic), and the SFT trainers.

Read in verl's sources at v0.2.0.post2, v0.3.0.post1, v0.4.0 to v0.9.0 and main of August 2026: trainer/config/*.yaml
for what absent keys mean, trainer/fsdp_sft_trainer.py (until v0.7.0) and sft_trainer.py, workers/fsdp_workers.py
(removed by PR 6067) and workers/engine/fsdp/transformer_impl.py for what is moved and read, utils/fsdp_utils.py for
how, utils/checkpoint/fsdp_checkpoint_manager.py for checkpoints, trainer/main_ppo.py, ppo/utils.py and
ppo/ray_trainer.py for which models are built.
"""

from __future__ import annotations

import functools
import re

from fsdp_doctor.check.config_findings import ConfigFinding, note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    ModelSettings,
    another_engine,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.verl import axis_values, conflicts, extraction_points, releases, roles
from fsdp_doctor.check.frameworks.verl.releases import VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import VerlModel
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Role, Use, use_of
from fsdp_doctor.matrix.axes import Strategy


def _recognises(settings: Settings) -> bool:
    return roles.is_ppo(settings) or roles.is_sft(settings)


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    if engine := roles.another_engine(settings):
        role: Role = "actor" if roles.is_ppo(settings) else "model"
        if not any(name in f"{engine.key} {engine.value}" for name in roles.WITHOUT_FSDP):
            raise Unreadable(f"{engine}: this engine of verl has an FSDP of its own, which is not read")
        return another_engine(role, engine)
    if config := roles.unknown_config(settings):
        raise Unreadable(f"{config}: what that configuration sets is not known; give its file beside the command")
    return [
        ModelSettings(
            role=model.role,
            sections=model.sections,
            keys=roles.KEYS,
            read=functools.partial(_read, model, settings, given),
        )
        for model in roles.built(settings)
        if model is not roles.REF or releases.of_model(model, settings, given.framework_version)
    ]


def _read(model: VerlModel, settings: Settings, given: Given) -> ModelReading:
    in_question = releases.of_model(model, settings, given.framework_version)
    strategy = model.strategy(settings)
    if strategy is not None and in_question and all(versions.fsdp1_only for versions in in_question):
        strategy = "fsdp1"
    found = list(conflicts.of_model(model, strategy, settings))
    if strategy is None:
        return not_under_fsdp(model.role, model.strategy_row(settings), *found)
    if not in_question:
        raise Unreadable("that version of verl does not know what these settings ask for")
    found += conflicts.loaded_twice(model, settings, in_question)
    found += conflicts.offload_frees_nothing(model, strategy, settings, given.world_size)
    if any(versions.own_strategy for versions in in_question):
        found += conflicts.own_strategy_not_set(model, settings)
    return ModelReading(
        uses=[_use(model, strategy, versions, settings, given) for versions in in_question],
        model=model.table.configured_model(settings, given.world_size),
        findings=found,
    )


def _use(model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings, given: Given) -> Use:
    return use_of(
        model.role,
        versions.label,
        axis_values.of_model(model, strategy, versions, settings, given.world_size),
        lambda scenario: extraction_points.of_model(model, versions, settings, scenario),
    )


def _world_size(settings: Settings) -> int | None:
    """Eight on one node by default; of an SFT trainer what torchrun starts, unless it is the one on Ray."""
    per_node = settings.number("trainer.n_gpus_per_node", default=8 if roles.is_ppo(settings) else None)
    nodes = settings.number("trainer.nnodes", default=1)
    return per_node * nodes if per_node and nodes else None


def _findings(settings: Settings) -> list[ConfigFinding]:
    found = [*conflicts.misplaced(settings), *_started_by_another(settings)]
    if roles.is_ppo(settings) and not roles.another_engine(settings):
        found += _not_built(settings)
    if settings.first("defaults"):
        found.append(note("Hydra's `defaults` are not followed; verl's own defaults are assumed"))
    return found


def _started_by_another(settings: Settings) -> list[ConfigFinding]:
    """A package with verl's settings that is not verl's may be a copy of it, with workers of its own."""
    script = settings.first(f"{LAUNCH}.script")
    module = re.fullmatch(r"(\w+)(?:\.\w+)+", str(script.value)) if script is not None else None
    if module is None or module[1] in ("verl", "recipe") or str(script and script.value).endswith((".py", ".sh")):
        return []
    sentence = f"{module[1]} is not verl's own package: what is said here holds if its workers are those of verl"
    return [note(sentence, script)]


def _not_built(settings: Settings) -> list[ConfigFinding]:
    """A note on each model that has settings and is not built."""
    found = []
    adapter = roles.REF.adapter(settings)
    if adapter and roles.asks_for_reference(settings):
        sentence = "no reference model is built: with an adapter the actor without it is the reference (ref_in_actor)"
        found.append(note(sentence, adapter))
    elif settings.below(roles.REF.sections[0]) and not roles.asks_for_reference(settings):
        sentence = "no reference model is built since v0.4: neither use_kl_loss nor use_kl_in_reward is true"
        found.append(note(sentence))
    if settings.below("critic") and not roles.has_critic(settings):
        decides = settings.first("critic.enable") or settings.first("algorithm.adv_estimator")
        found.append(note("no critic is built", decides))
    return found


VERL = Framework(
    name="verl",
    read_in="v0.2 to v0.9.0",
    distributions=("verl",),
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
    findings=_findings,
)
