"""Methods under test, extractions and loads; their table is ``methods.toml``.

This module imports no torch. The functions behind the names are in ``case/methods``.
"""

from __future__ import annotations

import functools
import pathlib
from dataclasses import dataclass

import msgspec

from fsdp_doctor.matrix.axes import CheckpointFit, Context, FsdpVersion, Optimizer, Phase
from fsdp_doctor.matrix.cases import AnyCase, Scenario
from fsdp_doctor.matrix.contracts import Direction, Method
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase

FIX, ADAPTER_FIX, LOADING_FIX = "full_tensors", "full_tensors.adapter", "load_full_tensors"
SAVING_OPTIMIZER_FIX, OPTIMIZER_FIX = "save_optimizer_state", "load_optimizer_state"


@dataclass(frozen=True, kw_only=True)
class MatrixMethod(Method):
    """Method of the matrix.

    function: ``module:name`` in ``fsdp_doctor.case.methods``.
    used_by: the frameworks that call the method.
    is_fix: the method is fsdp-doctor's replacement for the others, and runs with --fix.
    undoes_staging: the framework moves a staged module back with ``model.to("cpu")`` before it trains on, as
        CPUOffloadPolicy requires.
    without_mesh: FSDP1 has the method only for a model that was given no device mesh.
    offloads: the method moves the shards off the device before it yields, and so promises that their memory is free.
    sends: the framework sends the entries that the method yields, so the method is tried with every consumer.
    optimizer_first: the optimizer is made before the load, even if the model is still on the meta device.
    since: the oldest torch that has the method; empty if every supported torch has it.
    trains: a job calls the method right after a step, whose kernels may still be writing the weights, and trains on
        before the method has ended.
    on_accelerator: torch has the method only on an accelerator.
    """

    fsdp: tuple[FsdpVersion, ...]
    function: str
    used_by: str = ""
    is_fix: bool = False
    undoes_staging: bool = False
    without_mesh: bool = False
    offloads: bool = False
    sends: bool = False
    optimizer_first: bool = False
    since: str = ""
    trains: bool = False
    on_accelerator: bool = False

    def applies(self, scenario: Scenario) -> bool:
        """Returns whether the method makes sense in the scenario; the probe finds out whether it works."""
        if scenario.version not in self.fsdp or not self.has_values(scenario.values):
            return False
        suits = self._suits_loading(scenario) if self.direction == "in" else not scenario.is_of_loading
        suits = suits and (self.sends or not scenario.consumer.needs_sender)
        suits = suits and (not self.trains or _is_between_steps(scenario))
        return suits and (self._concerns_optimizers or scenario.optimizer is Optimizer.ADAMW)

    @property
    def _concerns_optimizers(self) -> bool:
        """True if the method is tried with every optimizer, because it reads, loads or must preserve optimizer
        state.
        """
        is_of_state = self.contract.form == "optimizer" or self.contract.loads != "model"
        return is_of_state or self.name in (FIX, LOADING_FIX) or is_user_method(self.name)

    def _suits_loading(self, scenario: Scenario) -> bool:
        """Returns whether the method can load the scenario's model and its kind of checkpoint."""
        contract = self.contract
        if scenario.init.is_meta and contract.loads != "model":
            return False
        whole_model = contract.loads == "model" and contract.weights == "own"
        if scenario.checkpoint is CheckpointFit.HUB:
            return whole_model and contract.given == "full"
        if scenario.checkpoint.saved_elsewhere:
            return self.is_fix or contract.given in ("dcp", "rank_files")
        return scenario.checkpoint.is_of_every_method or whole_model


def _is_between_steps(scenario: Scenario) -> bool:
    """Returns whether the job is between two steps: no raised step, staging, autograd context or copy in flight."""
    plain = scenario.context is Context.ORDINARY and scenario.transfer.is_blocking and not scenario.staging.is_staged
    return plain and scenario.phase is Phase.TRAINED


METHODS: tuple[MatrixMethod, ...] = tuple(
    msgspec.convert(
        msgspec.toml.decode(pathlib.Path(__file__).with_name("methods.toml").read_bytes())["method"], list[MatrixMethod]
    )
)
FIXES: frozenset[str] = frozenset(method.name for method in METHODS if method.is_fix)
METHOD_NAMES: tuple[str, ...] = tuple(dict.fromkeys(method.name for method in METHODS))


def is_user_method(name: str) -> bool:
    """Returns whether ``name`` is a user's ``module:function`` instead of a row of the table."""
    return ":" in name


def list_methods(scenario: Scenario, direction: Direction | None = None) -> tuple[MatrixMethod, ...]:
    """Lists the methods that make sense in a scenario, including the fixes.

    direction: only the methods of this direction.
    """
    return tuple(method for method in METHODS if direction in (None, method.direction) and method.applies(scenario))


def explain_impossible(method: MatrixMethod, scenario: Scenario) -> str:
    """Explains why the method cannot be tried in the scenario on any machine; empty if it can."""
    if method.direction == "out" and method.contract.form == "optimizer" and not scenario.phase.is_trained:
        return "there is no optimizer state before the first step"
    if scenario.consumer.keeps_entries and not method.contract.keeps:
        return f"{method.name} promises an entry only until the next entry, but {scenario.consumer} keeps it"
    if scenario.consumer.changes_streams and method.contract.streams == "one":
        return f"{method.name} promises its entries on one stream, but {scenario.consumer} asks on two streams"
    if method.direction == "in" and method.contract.loads != "model":
        if scenario.init.is_meta:
            return "an optimizer can be loaded only for a model with weights, not for a model on the meta device"
        if scenario.checkpoint.is_of_weights_alone:
            return f"{scenario.checkpoint} is a checkpoint of weights, but {method.name} loads an optimizer"
    is_of_full_state = method.contract.form == "optimizer" or method.contract.loads == "optimizer"
    if method.is_fix and is_of_full_state and not scenario.optimizer.has_full_state:
        return f"{method.name} refuses the state of {scenario.optimizer}, which has no value for each element"
    if method.without_mesh and not scenario.sharding.has_one_mesh:
        return f"{method.name} needs a model without a device mesh, but {scenario.sharding} is built with a mesh"
    if method.contract.form == "flat" and scenario.strategy.uses_original_parameters:
        return "torch has LOCAL_STATE_DICT only for use_orig_params=False"
    return scenario.contradiction


@functools.cache
def find_method(name: str, fsdp: int) -> MatrixMethod:
    """Returns the method with this name for FSDP1 or FSDP2. A user's ``module:function`` gets the default contract."""
    if is_user_method(name):
        return MatrixMethod(name=name, fsdp=(1, 2), function=name, summary=f"{name}(model)", sends=True)
    return next(method for method in METHODS if method.name == name and fsdp in method.fsdp)


def find_direction(case: AnyCase) -> Direction:
    """Returns whether the method of a case, from the matrix or a framework, extracts or loads."""
    if isinstance(case, FrameworkCase):
        return case.definition.direction
    return find_method(case.method, case.scenario.version).direction


def find_fix(name: str, fsdp: int) -> str:
    """Returns the name of the fix that replaces a method; ``local_shards``, which is a fix, replaces itself."""
    contract = find_method(name, fsdp).contract
    if contract.form == "local":
        return name
    if contract.direction == "out":
        if contract.form == "optimizer":
            return SAVING_OPTIMIZER_FIX
        return ADAPTER_FIX if contract.weights == "adapter" else FIX
    return LOADING_FIX if contract.loads == "model" else OPTIMIZER_FIX
