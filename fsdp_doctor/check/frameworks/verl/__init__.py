"""verl: PPO and its relatives (actor, ref, critic), and the SFT trainer.

Read in verl's sources at v0.7.1, v0.8.0, v0.9.0 and main of August 2026: trainer/config/*.yaml for what absent keys
mean, workers/fsdp_workers.py (removed by PR 6067) and workers/engine/fsdp/transformer_impl.py for what is moved and
read, utils/fsdp_utils.py for how, utils/checkpoint/fsdp_checkpoint_manager.py for checkpoints, trainer/ppo/utils.py
for which models are built.
"""

from __future__ import annotations

import functools

from fsdp_doctor.check.config_findings import ConfigFinding, note
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks.framework import Framework, Given, ModelReading, ModelSettings, not_under_fsdp
from fsdp_doctor.check.frameworks.verl import axis_values, conflicts, extraction_points, releases, roles
from fsdp_doctor.check.frameworks.verl.releases import VerlVersions
from fsdp_doctor.check.frameworks.verl.roles import VerlModel
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Use
from fsdp_doctor.matrix.axes import Strategy


def _recognises(settings: Settings) -> bool:
    return roles.is_ppo(settings) or any(f"engine.{key}" in settings for key in roles.ENGINE_KEYS)


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    models, _ = roles.built(settings)
    return [
        ModelSettings(
            role=model.role,
            sections=model.sections,
            keys=roles.KEYS,
            read=functools.partial(_read, model, settings, given),
        )
        for model in models
    ]


def _read(model: VerlModel, settings: Settings, given: Given) -> ModelReading:
    strategy = model.strategy(settings)
    found = list(conflicts.of_model(model, strategy, settings))
    if strategy is None:
        return not_under_fsdp(model.role, model.strategy_row(settings), *found)
    in_question = releases.of_model(model, settings, given.framework_version)
    if any(versions.own_strategy for versions in in_question):
        found += conflicts.own_strategy_not_set(model, settings)
    return ModelReading(
        uses=[_use(model, strategy, versions, settings, given) for versions in in_question],
        model=ConfiguredModel(
            path=settings.first(f"{model.model}.path"), ranks=axis_values.shard_group(model, settings, given.world_size)
        ),
        findings=found,
    )


def _use(model: VerlModel, strategy: Strategy, versions: VerlVersions, settings: Settings, given: Given) -> Use:
    scenario, reasons = axis_values.of_model(model, strategy, versions, settings, given.world_size)
    return Use(
        role=model.role,
        versions=versions.label,
        scenario=scenario,
        reasons=reasons,
        extractions=extraction_points.of_model(model, versions, settings, scenario),
    )


def _world_size(settings: Settings) -> int | None:
    """Eight on one node by default; unknown for the SFT trainer, whose ranks torchrun starts."""
    per_node = settings.number("trainer.n_gpus_per_node", default=8 if roles.is_ppo(settings) else None)
    nodes = settings.number("trainer.nnodes", default=1)
    return per_node * nodes if per_node and nodes else None


def _findings(settings: Settings) -> list[ConfigFinding]:
    _, not_built = roles.built(settings)
    found = [*not_built, *conflicts.misplaced(settings)]
    if settings.first("defaults"):
        found.append(note("Hydra's `defaults` are not followed; verl's own defaults are assumed"))
    return found


VERL = Framework(
    name="verl",
    known_by="actor_rollout_ref.*, critic.*, or engine.* of its SFT trainer",
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
    findings=_findings,
)
