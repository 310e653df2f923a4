"""One row of the table of paths: a way to extract weights, or to load them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Contract, Direction

# What a path that extracts knows nothing of.
_AXES_OF_LOADING = ("init", "checkpoint")
# What a path that loads is not tried with.
_SHARDINGS_OF_EXTRACTION = ("tp", "experts", "replicate")


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way to extract weights or to load them; its contract says which.

    function: ``module:name`` in ``fsdp_doctor.case.paths``. summary: the path in code. used_by: where it is met.
    is_fix: it is ours; it runs with --fix.
    undoes_staging: its user moves a staged module back with ``model.to("cpu")`` before training on,
        which is what a module under CPUOffloadPolicy needs whatever was extracted from it.
    without_mesh: FSDP1 has it only for a model that was given no device mesh.
    offloads: it moves the shards off the device before it yields, and so promises their memory back.
    optimizer_first: the optimizer is made before the load, also where the model is still on the meta device.
    only: axes on which it makes sense for these values alone.
    """

    name: str
    fsdp: tuple[int, ...]
    contract: Contract
    function: str
    summary: str
    used_by: str = ""
    is_fix: bool = False
    undoes_staging: bool = False
    without_mesh: bool = False
    offloads: bool = False
    optimizer_first: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        return self.contract.direction

    def applies(self, scenario: Scenario) -> bool:
        """Whether it makes sense there at all; whether it works is for the probe to say."""
        on_axes = all(getattr(scenario, axis) in values for axis, values in self.only.items())
        suits = self._suits_loading(scenario) if self.direction == "in" else _is_of_extraction(scenario)
        return scenario.version in self.fsdp and on_axes and suits

    def _suits_loading(self, scenario: Scenario) -> bool:
        """Whether what the path loads can be on meta, and a checkpoint of its form can be as the scenario has it."""
        contract = self.contract
        if scenario.sharding in _SHARDINGS_OF_EXTRACTION:
            return False
        if scenario.init == "meta" and contract.loads != "model":
            return False
        if scenario.saved_elsewhere:
            return self.is_fix or contract.given in ("dcp", "rank_files")
        whole_model = contract.loads == "model" and contract.weights == "own"
        return scenario.checkpoint in ("exact", "fp32") or whole_model


def _is_of_extraction(scenario: Scenario) -> bool:
    return all(getattr(scenario, axis) == AXIS[axis].default for axis in _AXES_OF_LOADING)
