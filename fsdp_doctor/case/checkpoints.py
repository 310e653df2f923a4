"""Checkpoint that a case loads: the state of another run of the same scenario after two training steps.

The contents of the checkpoint are read like the reference, without any method under test. If other processes save the
checkpoint, they save it as frameworks do, and also write the contents and the outcome of their next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import assert_never

from fsdp_doctor.case import codes, local_pieces, lora_reference, models, reference
from fsdp_doctor.case.local_pieces import Full, cut_part
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.sharding import read_contents
from fsdp_doctor.case.trainer import Start, Trainer, find_data_rank
from fsdp_doctor.case.training_state import StepOutcome, digest_outcome, train_one_step
from fsdp_doctor.matrix.axes import CheckpointFit, Offload, OffloadWay, Phase, Sharding
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Contract, Loads
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.fsdp.reader import ModelTensor

T = TypeVar("T")

EXTRA_KEY = "extra.weight"
_EXTRA_SHAPE = (3, 3)
# Options of the optimizer that differ from the saved run's, so that a load that does not restore them is detected.
_OTHER_OPTIONS = {"lr": 5e-4, "weight_decay": 0.1}
_DCP, _RANK_FILES, _HUB = "dcp", "rank_files", "hub"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """State of a run between two steps. Tensors are on the host.

    weights: the tensors of the state dict, under all names.
    decoded: the weights that the 4-bit codes among ``weights`` stand for.
    scales: the scales of the 4-bit codes.
    tied_names: the names that are not a parameter's first name.
    missing_key: the name that is left out of the checkpoint ``missing-key``.
    moments: the optimizer's state by ``<parameter>.<state>``, unsharded.
    options: the options of the only param group.
    raw_optimizer: this rank's ``optimizer.state_dict()``.
    data_position: this rank's position in its batches.
    num_steps: the number of steps that the run has made.
    went_on: the outcome of the run's next step; None if another number of ranks made that step, with other batches.
    directory: the directory with the files that frameworks save; None if no other process saved the checkpoint.
    """

    weights: Full
    decoded: Full
    scales: codes.Scales
    tied_names: frozenset[str]
    missing_key: str
    moments: Full
    options: Mapping[str, Any]
    raw_optimizer: dict[str, Any]
    data_position: torch.Tensor
    num_steps: int
    went_on: StepOutcome | None
    directory: pathlib.Path | None = None


def find_source(scenario: Scenario) -> Scenario:
    """Returns the scenario whose run is saved.

    The run's scenario has the same values as ``scenario`` on every axis that affects the bits of a training step.
    """
    return scenario.change(
        offload=_keep_what_decides_bits(scenario.offload),
        staging="unstaged",
        phase="trained",
        transfer="blocking",
        init="materialized",
        checkpoint="exact",
        context="ordinary",
    )


def _keep_what_decides_bits(offload: Offload) -> Offload:
    """Drops from an offload everything that cannot change the bits of a training step.

    An offload can change bits if parameters are updated on the host or from other gradients. verl's manual flags and
    other moves by hand change no bits.
    """
    match offload.way:
        case OffloadWay.PARTIAL | OffloadWay.BY_PARAMETER | OffloadWay.AROUND_STEP:
            return offload
        case OffloadWay.BY_PHASE | OffloadWay.MOVED:
            return Offload()
        case None:
            return Offload.from_flags(policy=offload.policy)
        case _:
            assert_never(offload.way)


def take(scenario: Scenario, runtime: Runtime, save: Callable[[Trainer], None] = lambda trainer: None) -> Checkpoint:
    """Trains the scenario of :func:`find_source` for three steps, and returns the state after the second step.

    Every rank must call it.

    save: a function that is also called after the second step.
    """
    start = Start(same_batches=_needs_same_batches(scenario), saves=scenario.checkpoint is CheckpointFit.OTHER_WORLD)
    trainer = Trainer(find_source(scenario), runtime, start=start)
    trainer.step()
    trainer.step()
    truth = reference.take(trainer.model, trainer.optimizer, runtime)
    tied = [names for names in reader.read(trainer.model).list_all_names() if len(names) > 1]
    (group,) = trainer.optimizer.state_dict()["param_groups"]
    raw_optimizer = _copy_as_file(trainer.optimizer.state_dict())
    data_position, num_steps = trainer.read_data_position(), trainer.num_steps
    save(trainer)
    train_one_step(trainer)
    return Checkpoint(
        weights=truth.full | truth.codes,
        decoded={name: truth.full[name] for name in truth.codes},
        scales=codes.copy_scales(trainer.model),
        tied_names=frozenset(name for names in tied for name in names[1:]),
        missing_key=max(set(truth.parameters) - {name for names in tied for name in names}),
        moments=truth.optimizer,
        options={key: value for key, value in group.items() if key != "params"},
        raw_optimizer=raw_optimizer,
        data_position=data_position,
        num_steps=num_steps,
        went_on=digest_outcome(trainer.model, trainer.optimizer),
    )


def _copy_as_file(state: dict[str, Any]) -> dict[str, Any]:
    """Copies a state through a file, since deepcopy cannot copy torchao's 8-bit tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied: dict[str, Any] = torch.load(file, weights_only=False)
    return copied


def name_directory(scenario: Scenario, scratch: pathlib.Path) -> pathlib.Path:
    """Returns the directory into which processes save the checkpoint of a scenario."""
    return scratch / "saved" / f"{find_source(scenario).id.replace('/', '-')}-{scenario.checkpoint}"


def save(scenario: Scenario, runtime: Runtime) -> None:
    """Takes the checkpoint of a scenario, and saves it for later processes. Every rank must call it."""
    directory = name_directory(scenario, runtime.scratch)
    directory.mkdir(parents=True, exist_ok=True)
    is_of_hub = scenario.checkpoint is CheckpointFit.HUB
    checkpoint = take(scenario, runtime, lambda trainer: None if is_of_hub else save_as_frameworks(trainer, directory))
    if runtime.rank == 0 and is_of_hub:
        unsharded: Any = models.build(scenario.model, scenario.dims, runtime.custom_model)
        unsharded.load_state_dict(checkpoint.weights)
        unsharded.save_pretrained(directory / _HUB)
    if runtime.rank == 0:
        torch.save((runtime.world_size, dataclasses.replace(checkpoint, raw_optimizer={})), directory / "whole.pt")
    torch.save((checkpoint.data_position, checkpoint.went_on), directory / f"rank_{runtime.rank}.pt")


def save_as_frameworks(trainer: Trainer, directory: pathlib.Path) -> None:
    """Saves model and optimizer twice: as a distributed checkpoint, and as one file per rank.

    The files of the ranks are like those that verl's FSDPCheckpointManager writes.

    Every rank must call it.
    """
    model, optimizer = trainer.model, trainer.optimizer
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory / _DCP)
    sharded: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
        sharded = FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)
    with sharded:
        _write_rank_files(directory / _RANK_FILES, trainer.runtime, model.state_dict(), optimizer.state_dict())


def _write_rank_files(
    directory: pathlib.Path, runtime: Runtime, model: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{runtime.world_size}_rank_{runtime.rank}.pt"
    torch.save(model, directory / f"model_{suffix}")
    torch.save(optimizer, directory / f"optim_{suffix}")


def _read(scenario: Scenario, runtime: Runtime) -> Checkpoint:
    """Reads the checkpoint that :func:`save` left.

    If more ranks load than saved, each additional rank takes its data position from a rank that saved.
    """
    directory = name_directory(scenario, runtime.scratch)
    saved_by: int
    checkpoint: Checkpoint
    saved_by, checkpoint = torch.load(directory / "whole.pt", weights_only=False)
    is_of_as_many = saved_by == runtime.world_size
    rank = runtime.rank if is_of_as_many else find_data_rank(scenario.sharding, runtime) % saved_by
    position, went_on = torch.load(directory / f"rank_{rank}.pt")
    return dataclasses.replace(
        checkpoint,
        data_position=position,
        went_on=went_on if is_of_as_many else None,
        directory=directory,
    )


def _make_saved_weights(checkpoint: Checkpoint, fit: CheckpointFit) -> dict[str, torch.Tensor]:
    """Makes the weights that a checkpoint with the value ``fit`` contains, as fresh tensors on the host."""
    saved = {name: tensor.clone() for name, tensor in checkpoint.weights.items()}
    match fit:
        case (
            CheckpointFit.EXACT
            | CheckpointFit.FP32
            | CheckpointFit.TIED_TWICE
            | CheckpointFit.OTHER_RUN
            | CheckpointFit.OTHER_WORLD
            | CheckpointFit.HUB
        ):
            return saved
        case CheckpointFit.BF16:
            return {name: t.bfloat16() if t.is_floating_point() else t for name, t in saved.items()}
        case CheckpointFit.EXTRA_KEY:
            return {**saved, EXTRA_KEY: torch.ones(_EXTRA_SHAPE)}
        case CheckpointFit.MISSING_KEY:
            return {name: tensor for name, tensor in saved.items() if name != checkpoint.missing_key}
        case CheckpointFit.TIED_ONCE:
            return {name: tensor for name, tensor in saved.items() if name not in checkpoint.tied_names}
        case _:
            assert_never(fit)


def make_expected_weights(checkpoint: Checkpoint, fit: CheckpointFit) -> dict[str, torch.Tensor]:
    """Makes the weights that the model must have after it has loaded a checkpoint with the value ``fit``.

    The weights have the dtypes of the model's parameters. A name that the checkpoint lacks is left out.
    """
    saved = {name: checkpoint.weights[name] for name in checkpoint.tied_names} | _make_saved_weights(checkpoint, fit)
    return {name: saved[name].to(weight.dtype) for name, weight in checkpoint.weights.items() if name in saved}


def start_of(scenario: Scenario) -> Start:
    """Returns the start of a trainer that will load a checkpoint.

    The weights come from another seed or are on the meta device. The optimizer's options differ from the saved run's.
    """
    return Start(
        weights="meta" if scenario.init.is_meta else "other",
        options=_OTHER_OPTIONS,
        same_batches=_needs_same_batches(scenario),
    )


def _needs_same_batches(scenario: Scenario) -> bool:
    """Returns whether every rank must train on the same batches.

    FSDP1 reduces no gradient in a shard group of one, so each rank would train a separate model, but a checkpoint has
    one set of weights.
    """
    return scenario.version == 1 and scenario.sharding is Sharding.SIZE1


class SavedCheckpoints:
    """Checkpoints of a run, each made once. All ranks must make the same calls.

    A checkpoint is kept in a file for each rank, so that later generations of workers need not train it again.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._checkpoints: dict[tuple[Scenario, str], Checkpoint] = {}
        self._next_steps: dict[tuple[Scenario, Phase, CheckpointFit, bool], StepOutcome] = {}

    def choose(self, scenario: Scenario) -> Checkpoint:
        """Returns the checkpoint that a load in the scenario is given."""
        elsewhere = scenario.checkpoint.saved_elsewhere
        key = (find_source(scenario), scenario.checkpoint if elsewhere else "")
        if key not in self._checkpoints:
            self._checkpoints[key] = (
                _read(scenario, self._runtime)
                if elsewhere
                else self._keep(f"{key[0].id}/saved", lambda: take(scenario, self._runtime))
            )
        return self._checkpoints[key]

    def start(self, scenario: Scenario, start: Start) -> Trainer:
        """Builds a trainer of the scenario, and trains it for one step if the scenario has a trained model.

        The saved run has trained for two steps, so a load that leaves out the optimizer's step counters is detected.
        """
        trainer = Trainer(scenario, self._runtime, start=start)
        if scenario.phase.is_trained:
            trainer.step()
            trainer.resume()
        return trainer

    def expect_next_step(self, scenario: Scenario, loads: Loads) -> StepOutcome:
        """Returns the outcome that the step after a load must have.

        Usually this is the outcome of the saved run's next step. If only weights are loaded, or if another number of
        ranks saved the run, it is the outcome of a model into which the same state is written by hand.
        """
        checkpoint = self.choose(scenario)
        with_optimizer = loads != "model"
        if with_optimizer and checkpoint.went_on is not None:
            return checkpoint.went_on
        key = (find_source(scenario), scenario.phase, scenario.checkpoint, with_optimizer)
        if key not in self._next_steps:
            name = "/".join(str(part) for part in (key[0].id, *key[1:]))
            self._next_steps[key] = self._keep(name, lambda: self._train_from(checkpoint, scenario, with_optimizer))
        return self._next_steps[key]

    def _keep(self, name: str, make: Callable[[], T]) -> T:
        """Returns the result of ``make``. Later generations of workers read the result from a file.

        Each rank has its own file, named after ``name``. Every rank must call this function.
        """
        rank, world_size = self._runtime.rank, self._runtime.world_size
        file = self._runtime.scratch / "kept" / f"{name.replace('/', '-')}-{rank}_of_{world_size}.pt"
        if _is_on_every_rank(file, self._runtime):
            kept: T = torch.load(file, weights_only=False)
            return kept
        made = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        torch.save(made, unfinished)
        unfinished.replace(file)
        return made

    def _train_from(self, checkpoint: Checkpoint, scenario: Scenario, with_optimizer: bool) -> StepOutcome:
        # An optimizer has state to write to only after a step.
        source = find_source(scenario).change(phase="trained" if with_optimizer else scenario.phase)
        trainer = self.start(source, start_of(source))
        local_pieces.write(
            local_pieces.list_model_pieces(trainer.model, make_expected_weights(checkpoint, scenario.checkpoint))
        )
        codes.write_scales(trainer.model, checkpoint.scales)
        if with_optimizer:
            moments, _ = local_pieces.list_optimizer_pieces(trainer.model, trainer.optimizer, checkpoint.moments)
            local_pieces.write(moments)
            trainer.optimizer.param_groups[0].update(checkpoint.options)
            trainer.seek(checkpoint.data_position)
            trainer.num_steps = checkpoint.num_steps
        train_one_step(trainer)
        return digest_outcome(trainer.model, trainer.optimizer)


def _is_on_every_rank(path: pathlib.Path, runtime: Runtime) -> bool:
    """Returns whether ``path``, which may differ between the ranks, exists on every rank.

    Every rank must call it.
    """
    is_there = torch.tensor([int(path.exists())], device="cpu")
    # Another group of ranks may have written the path of one rank, but not yet that of another.
    dist.all_reduce(is_there, op=dist.ReduceOp.MIN, group=runtime.control)
    return bool(is_there.item())


def _read_files(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


class CheckpointForms:
    """Brings a checkpoint into the form that a method needs. If torch's function for this form is under test, this is
    done by hand.

    For a model in 4 bits, the form ``full`` has decoded weights, like the checkpoint of the base model. Every other
    form has codes, like a checkpoint that torch saved from such a model.

    Every rank must call the methods in the same order.

    directory: a path that does not exist yet.
    files: the files that save_pretrained wrote; None for other checkpoints.
    """

    def __init__(self, checkpoint: Checkpoint, fit: CheckpointFit, trainer: Trainer, directory: pathlib.Path) -> None:
        self._checkpoint = checkpoint
        self._fit = fit
        files = checkpoint.directory / _HUB if checkpoint.directory and fit is CheckpointFit.HUB else None
        self.files = files
        self._weights = _read_files(files) if files is not None else _make_saved_weights(checkpoint, fit)
        self._model, self._optimizer = trainer.model, trainer.optimizer
        self._runtime = trainer.runtime
        self._scenario = trainer.scenario
        self._directory = directory

    def make_state(self, contract: Contract) -> Any:
        """Makes the argument ``state`` of a method with that contract."""
        saved = self._checkpoint.directory
        match contract.given:
            case "full":
                optimizer = self._make_optimizer_state(sharded=False) if contract.loads != "model" else {}
                if contract.ranks == "rank0" and self._runtime.rank != 0:
                    return _select_loaded(contract, {}, {})
                weights = {**self._weights, **self._checkpoint.decoded}
                if contract.weights == "adapter":
                    weights = lora_reference.select_adapter_weights(weights)
                return _select_loaded(contract, weights, optimizer)
            case "sharded":
                weights = self._make_sharded_weights() if contract.loads != "optimizer" else {}
                optimizer = self._make_optimizer_state(sharded=True) if contract.loads != "model" else {}
                return _select_loaded(contract, weights, optimizer)
            case "dcp":
                return saved / _DCP if saved else self._write_once(_DCP, self._write_dcp)
            case "rank_files":
                return saved / _RANK_FILES if saved else self._write_once(_RANK_FILES, self._write_rank_files)
            case _:
                assert_never(contract.given)

    def _write_once(self, form: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """Returns the directory with the checkpoint's files, which only the first case that needs them writes.

        All cases of a run share the files, because they depend only on the checkpoint.
        """
        source, control = find_source(self._scenario), self._runtime.control
        directory = self._runtime.scratch / "given" / f"{source.id.replace('/', '-')}-{self._fit}-{form}"
        if not _is_on_every_rank(directory, self._runtime):
            write(self._directory)
            dist.barrier(group=control)
            if self._runtime.rank == 0:
                directory.parent.mkdir(exist_ok=True)
                # Fails if another group of ranks has written the same files in the meantime.
                with contextlib.suppress(OSError):
                    self._directory.rename(directory)
            dist.barrier(group=control)
        return directory

    def _write_dcp(self, directory: pathlib.Path) -> None:
        state = {"model": self._make_sharded_weights(), "optimizer": self._make_optimizer_state(sharded=True)}
        dcp.save(state, checkpoint_id=directory)

    def _write_rank_files(self, directory: pathlib.Path) -> None:
        weights, optimizer = self._make_sharded_weights(), self._checkpoint.raw_optimizer
        _write_rank_files(directory, self._runtime, weights, optimizer)

    def _make_sharded_weights(self) -> dict[str, Any]:
        like = self._find_sharded_tensors()
        return {name: self._make_sharded(like.get(name), tensor) for name, tensor in self._weights.items()}

    def _find_sharded_tensors(self) -> dict[str, ModelTensor | None]:
        """Maps the name of each entry to the tensor whose sharding the entry must get.

        The tensor is None for parameters that FSDP1 shards by their first dim.
        """
        contents = read_contents(self._model)
        like: dict[str, ModelTensor | None] = {name: t for t in contents.list_tensors() for name in t.names}
        return like | dict.fromkeys(name for unit in contents.fsdp1_units for names in unit.names for name in names)

    def _make_sharded(self, like: ModelTensor | None, full: torch.Tensor) -> torch.Tensor:
        device = self._runtime.device
        mesh = self._runtime.make_mesh(self._scenario.sharding)
        num_shards = mesh.size(mesh.ndim - 1)
        shape = full.shape
        if like is not None and isinstance(like.tensor, DTensor):
            mesh, placements, shape = like.tensor.device_mesh, like.tensor.placements, like.tensor.shape
            local = cut_part(like.placed, full).clone().to(device)
        elif like is None and self._is_sharded_by_fsdp1(full) and num_shards > 1:
            placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))
            chunks = full.chunk(num_shards)
            index = mesh.get_local_rank(mesh.ndim - 1)
            local = (chunks[index] if index < len(chunks) else full[:0]).clone().to(device)
        else:
            return full.clone().to(device)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=full.contiguous().stride()
        )

    def _is_sharded_by_fsdp1(self, full: torch.Tensor) -> bool:
        """Returns whether FSDP1 shards the tensor.

        The tensor must be an entry of a sharded state dict, which FSDP1 has only in a shard group of several ranks.
        """
        return self._scenario.version == 1 and bool(full.ndim) and full.shape != _EXTRA_SHAPE

    def _make_optimizer_state(self, *, sharded: bool) -> dict[str, Any]:
        """Returns the optimizer's state in the form of ``get_optimizer_state_dict``, by parameter names.

        Every rank must call it.
        """
        like = self._find_sharded_tensors()
        if not self._scenario.optimizer.has_full_state:
            return self._make_state_of_tensors(like, sharded=sharded)
        state: dict[str, dict[str, Any]] = {}
        for name, full in self._checkpoint.moments.items():
            parameter, _, key = name.rpartition(".")
            value = self._make_sharded(like[parameter], full) if sharded and full.ndim else full.clone()
            state.setdefault(parameter, {})[key] = value
        buffers = {name for buffer in reader.read(self._model).buffers for name in buffer.names}
        names = [name for name in like if name not in buffers and name not in self._checkpoint.tied_names]
        optimized = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        # Of a tensor that FSDP1 shards there is no parameter by itself.
        names = [name for name in names if (tensor := like[name]) is None or id(tensor.tensor) in optimized]
        return {"state": state, "param_groups": [{**self._checkpoint.options, "params": names}]}

    def _make_state_of_tensors(self, like: dict[str, ModelTensor | None], *, sharded: bool) -> dict[str, Any]:
        """Returns the state of an optimizer with tensor classes of its own, such as AdamW8bit, by parameter names.

        like: the tensors of the model, by name.
        """
        names = {id(t.tensor): t.names[0] for t in like.values() if t is not None}
        (group,) = self._optimizer.param_groups
        in_order = [names[id(parameter)] for parameter in group["params"]]

        def place(value: Any) -> Any:
            if sharded or not isinstance(value, DTensor):
                return value
            on_device: Any = value.to(self._runtime.device)
            return on_device.full_tensor()

        # A setter may keep the tensors that it is given.
        entries = _copy_as_file(self._checkpoint.raw_optimizer)["state"].items()
        state = {in_order[index]: {key: place(value) for key, value in values.items()} for index, values in entries}
        return {"state": state, "param_groups": [{**self._checkpoint.options, "params": in_order}]}


def _select_loaded(contract: Contract, weights: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    match contract.loads:
        case "model":
            return weights
        case "optimizer":
            return optimizer
        case "both":
            return {"model": weights, "optimizer": optimizer}
        case _:
            assert_never(contract.loads)
