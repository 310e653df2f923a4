"""The model that a configuration names: which of the matrix's models it is, and whether its shards are uneven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.check.config_findings import ConfigFinding, note
from fsdp_doctor.check.local_model import LocalModel, local_model
from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.use import Use
from fsdp_doctor.matrix.axes import AxisName


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel:
    """path: the setting that names the model. ranks: of one shard group. None where the configuration has neither."""

    path: Setting | None = None
    ranks: int | None = None


def with_model(uses: Sequence[Use], model: ConfiguredModel) -> tuple[tuple[Use, ...], list[ConfigFinding]]:
    """The uses with the type and the dimensions of the model, and what follows; what is not known is said once."""
    scenarios = [use.scenario for use in uses if use.scenario is not None]
    if not scenarios:
        return tuple(uses), []
    local = local_model(str(model.path.value)) if model.path else None
    if local is None or model.ranks is None:
        return tuple(uses), [_dims_not_known(model)] if any(map(_races_where_uneven, uses)) else []
    found: list[ConfigFinding] = []
    if local.built_in is None:
        sentence = f"the probe has no model of type {local.model_type!r} and uses {scenarios[0].model} in its place"
        found.append(note(sentence, model.path))
    sizes = ", ".join(f"{name}={size}" for name, size in local.uneven(model.ranks).items())
    where = f"config.json of {model.path}" + (f": {sizes} over {model.ranks} ranks" if sizes else "")
    changed = tuple(use.changed(_changes(use, local, uneven=bool(sizes)), where) for use in uses)
    racing = [use for use in changed if sizes and _races_where_uneven(use)]
    if racing:
        found.append(_race(racing, sizes, model.ranks))
    return changed, found


def _changes(use: Use, local: LocalModel, *, uneven: bool) -> dict[AxisName, str]:
    changes: dict[AxisName, str] = {}
    if use.scenario is None:
        return changes
    if uneven:
        changes["dims"] = "uneven"
    # An adapter's model stays what it is: the matrix has one model with LoRA.
    if local.built_in is not None and local.built_in != "qwen3" and use.scenario.model == "qwen3":
        changes["model"] = local.built_in
    return changes


def _races_where_uneven(use: Use) -> bool:
    scenario = use.scenario
    return (
        scenario is not None
        and scenario.strategy == "fsdp2"
        and scenario.param_offload
        and scenario.transfer == "nonblocking"
        and scenario.sharding != "size1"
    )


def _race(racing: Sequence[Use], sizes: str, ranks: int) -> ConfigFinding:
    sentence = (
        f"the manual offload does not wait for its copies, and {sizes} cannot be divided evenly among the {ranks} "
        "ranks of a shard group: FSDP2 pads such a shard on the host while the copy is still running, and weights are "
        "lost"
    )
    settings = tuple(str(reason) for reason in racing[0].reasons if reason.axis in ("offload", "transfer", "dims"))
    ids = tuple(case.id for use in racing for case in use.cases)
    titles = tuple(dict.fromkeys(use.title for use in racing))
    return ConfigFinding(kind="conflict", sentence=sentence, settings=settings, cases=ids, holds_for=titles)


def _dims_not_known(model: ConfiguredModel) -> ConfigFinding:
    if model.ranks is None:
        missing = "the configuration does not say how many ranks there are; give --world-size"
    elif model.path is None:
        missing = "the configuration does not name a model"
    else:
        missing = "the model is not a local directory"
    sentence = (
        "the manual offload does not wait for its copies, which loses weights where a dimension cannot be divided "
        f"evenly among the ranks of a shard group; whether this model has one is not known: {missing}"
    )
    return note(sentence, model.path)
