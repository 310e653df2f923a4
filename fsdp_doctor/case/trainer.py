"""Small trainer that builds, shards, trains, offloads and stages a model like verl.

A scenario goes through verl's cycle: a training step; a step that raises, manual offload and staging, if the scenario
has them; the method under test; the manual offload again; the load; the next training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from typing_extensions import assert_never

from fsdp_doctor.case import models, offloading, optimizers, sharding
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.examination.stage_watch import Unwatched
from fsdp_doctor.matrix.axes import CheckpointFit, OffloadWay, Precision, Sharding
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.weights.fsdp import private


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of a trainer.

    weights: the weights with which the model is built.
    options: options of the optimizer.
    same_batches: whether every rank trains on the batches of rank 0.
    saves: whether the trained model is saved for another number of ranks. If so, the mesh may have fewer ranks than
        two dims need; one dim then has only one rank.
    """

    weights: models.Weights = "own"
    same_batches: bool = False
    saves: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})


START = Start()


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """Returns the dtype to which FSDP casts parameters for the computation; None if it casts nothing."""
    match precision:
        case Precision.BF16_COMPUTE:
            return torch.bfloat16
        case Precision.FP32_COMPUTE:
            return None
        case _:
            assert_never(precision)


class Unsupported(Exception):
    """Error for a scenario that cannot be built here; the message gives the reason to the user."""


class StepRaised(Exception):
    """Error of a step that the trainer makes raise."""


class Trainer:
    """Sharded model with its optimizer, in the state between two training steps.

    Every rank must call every method that is not a property.

    names_on_host: the parameters that were sharded under an offload policy, which keeps them on the host between steps.
    watch: the object that measures the memory of the trainer's stages.
    """

    watch = Unwatched()

    def __init__(self, scenario: Scenario, runtime: Runtime, *, with_mesh: bool = True, start: Start = START) -> None:
        reason = _explain_impossible(scenario, runtime, saves=start.saves)
        if reason:
            raise Unsupported(reason)
        self.scenario = scenario
        self.runtime = runtime
        self.with_mesh = with_mesh
        self.num_steps = 0
        self.model = self._build_sharded_model(start.weights)
        self._tokens = models.choose_token_range(scenario.model, self.model)
        self._options = dict(start.options)
        self.optimizer = self.make_optimizer()
        data_rank = find_data_rank(scenario.sharding, runtime)
        self._generator = torch.Generator().manual_seed(0 if start.same_batches else data_rank)
        self._staged = False

    def _build_sharded_model(self, weights: models.Weights) -> nn.Module:
        plain = models.build(self.scenario.model, self.scenario.dims, self.runtime.custom_model, weights)
        if weights == "own" and not self.scenario.model.is_custom:
            models.add_special_values(plain)
        if self.scenario.checkpoint is CheckpointFit.FP32:
            models.halve(plain)
        if self.scenario.model.is_quantized:
            # The scales are in no parameter and in no buffer: FSDP leaves them where they are.
            plain.to(self.runtime.device)
            # bitsandbytes compiles what it has no kernels for, and there is no compiler for the emulated device.
            torch.compiler.set_stance("force_eager")
        if self.runtime.training.checkpointing:
            models.checkpoint_activations(plain)
        self._offloaded_units = frozenset(sharding.find_offloaded_units(plain, self.scenario.offload))
        self.names_on_host = frozenset(
            f"{prefix}.{name}"
            for prefix, module in plain.named_modules()
            if module in self._offloaded_units
            for name, _ in module.named_parameters(recurse=False)
        )
        mesh = self.runtime.make_mesh(self.scenario.sharding)
        if self.scenario.version == 2:
            return sharding.shard_fsdp2(
                plain,
                mesh,
                kind=self.scenario.sharding,
                compute_dtype=compute_dtype(self.scenario.precision),
                offload=self.scenario.offload,
                # A machine without an accelerator has nothing to pin memory for, and torch refuses to.
                pin_memory=self.scenario.pinning.is_pinned and self.runtime.has_accelerator,
            )
        return sharding.shard_fsdp1(
            plain,
            mesh if self.with_mesh else None,
            self.runtime.device,
            compute_dtype=compute_dtype(self.scenario.precision),
            offload=self.scenario.offload,
            use_orig_params=self.scenario.strategy.uses_original_parameters,
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Makes the scenario's optimizer over the model's present parameters.

        Parameters that this optimizer cannot take get a second optimizer, which keeps no state.
        """
        # torch's kernels for many tensors at once refuse DTensors of several meshes.
        sharding = self.scenario.sharding
        foreach = False if sharding is Sharding.TP or sharding.is_of_experts else None
        optimizer, *self._others = optimizers.make_optimizers(
            self.scenario.optimizer, self.model, foreach=foreach, options=self._options
        )
        if self.scenario.offload.way is OffloadWay.AROUND_STEP:
            for each in (optimizer, *self._others):
                offloading.keep_state_on_host(each, self.runtime.device)
        return optimizer

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Optimizer of the scenario and, if it cannot take all parameters, the optimizer of the other parameters."""
        return (self.optimizer, *self._others)

    def read_data_position(self) -> torch.Tensor:
        """Returns the position of this rank in the order of its batches, for :meth:`seek`."""
        return self._generator.get_state()

    def seek(self, position: torch.Tensor) -> None:
        """Moves to a position in the order of batches, which :meth:`read_data_position` of any run returned."""
        self._generator.set_state(position)

    def step(self, after_forward: Callable[[], object] = lambda: None) -> None:
        """Runs forward, backward and the optimizer's step. Parameters and optimizer state must be loaded.

        Raises FloatingPointError if the loss is not finite.

        after_forward: a function that is called between the first forward and its backward.
        """
        loss = self._compute_loss()
        after_forward()
        loss.backward()
        if self.scenario.offload.way is OffloadWay.AROUND_STEP:
            self._compute_loss().backward()
        if self.scenario.version == 1 and self.scenario.offload.way is OffloadWay.PARTIAL:
            # FSDP1 waits for the gradients that it copies to the host only if its root is offloaded.
            self.runtime.synchronize()
        for optimizer in self.optimizers:
            optimizer.step()
        self._drop_gradients()
        self.num_steps += 1
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(f"the loss of training step {self.num_steps} is {float(loss)}")

    def _compute_loss(self) -> torch.Tensor:
        """Computes the loss of the next batch."""
        size = (self.runtime.training.batch, self.runtime.training.sequence)
        tokens = torch.randint(self._tokens.start, self._tokens.stop, size, generator=self._generator)
        tokens = tokens.to(self.runtime.device)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]

    def interrupt_step(self) -> None:
        """Runs a step that raises, if the scenario has such a step, and catches the error as a job does.

        The interrupted step takes no batch, so the next step has the same batch as without it.
        """
        raised = self.scenario.phase.raised
        if raised is None:
            return
        # The head comes last; this one is in the last layer, or in the adapter of its last projection.
        layer = [module for module in self.model.modules() if isinstance(module, nn.Linear)][-2]

        def fail(*_: Any) -> None:
            raise StepRaised

        def fail_in_backward(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        position = self.read_data_position()
        hook = layer.register_forward_hook(fail if raised == "forward" else fail_in_backward)
        with contextlib.suppress(StepRaised):
            self.step()
            raise AssertionError(f"a step finished, although its {raised} should have raised")
        hook.remove()
        # While the modules show what they computed with: a state dict would reshard them, and its gradients would stay.
        self.model.zero_grad()
        self._drop_gradients()
        self.seek(position)

    def recover(self) -> bool:
        """Recovers after a step that raised, by torch's own means. Returns whether the next step will be right.

        For FSDP2 this is ``reset_iter_state``, which torch has from 2.13 on; for FSDP1, a step whose gradients are
        dropped.
        """
        raised = self.scenario.phase.raised
        if raised is None:
            return True
        if isinstance(self.model, FSDPModule) and hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
            return True
        if raised == "backward":
            return False
        if isinstance(self.model, FullyShardedDataParallel):
            position = self.read_data_position()
            self._compute_loss().backward()
            self._drop_gradients()
            self.seek(position)
        return True

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def offload(self) -> None:
        """Offloads like the framework, if the scenario has a manual offload."""
        non_blocking = not self.scenario.transfer.is_blocking
        if self.scenario.param_offload:
            offloading.offload(self.model, non_blocking=non_blocking)
        if self.scenario.optimizer_offload:
            self._move_state(torch.device("cpu"), non_blocking=non_blocking)
        if self.scenario.offload.way is OffloadWay.MOVED:
            offloading.move_shards(self.model, torch.device("cpu"), pin_memory=self.runtime.has_accelerator)
            self._move_state(torch.device("cpu"))

    def stage(self) -> None:
        """Moves the model to the device like verl's load_fsdp_model_to_gpu, whatever the scenario's offload is."""
        self._load_parameters()
        self._staged = True

    def resume(self, *, undo_staging: bool = False) -> None:
        """Performs the actions of verl between the extraction and the next training step.

        undo_staging: whether to move a module that was staged under CPUOffloadPolicy back to the CPU, where torch
        expects its shards; verl before PR 6463 did not.
        """
        self.unstage(undo_staging=undo_staging)
        self.load()

    def unstage(self, *, undo_staging: bool = False) -> None:
        """Offloads the staged modules again: the first half of :meth:`resume`."""
        if self._staged and self.scenario.offload.takes_shards_away:
            self.offload()
        if self._staged and undo_staging and self.scenario.offload.takes_policy and self.scenario.version == 2:
            offloading.unstage(self.model, self.runtime.device, self._offloaded_units)
        self._staged = False

    def load(self) -> None:
        """Loads the memory that a manual offload moved away: the second half of :meth:`resume`."""
        if self.scenario.param_offload:
            self._load_parameters()
        if self.scenario.optimizer_offload:
            self._move_state(self.runtime.device)
        if self.scenario.offload.way is OffloadWay.MOVED:
            offloading.move_shards(self.model, self.runtime.device, pin_memory=False)
            self._move_state(self.runtime.device)

    def list_tensor_ids(self) -> set[int]:
        """Lists the ids of the tensors that live as long as the trainer: parameters, buffers and optimizer state."""
        state = (value for values in self.optimizer.state.values() for value in values.values())
        tensors = (*self.model.parameters(), *self.model.buffers(), *state)
        shards = (private.read_local_tensor(tensor) for tensor in tensors if isinstance(tensor, DTensor))
        return {id(tensor) for tensor in (*tensors, *shards)}

    def _move_state(self, device: torch.device, *, non_blocking: bool = False) -> None:
        for optimizer in self.optimizers:
            offloading.move_optimizer(optimizer, device, non_blocking=non_blocking)

    def _load_parameters(self) -> None:
        non_blocking = not self.scenario.transfer.is_blocking
        offloading.load(self.model, self.runtime.device, non_blocking=non_blocking)


def find_data_rank(sharding: Sharding, runtime: Runtime) -> int:
    """Returns the index of the batches on which the rank trains.

    Neighbouring ranks under tensor or expert parallelism have the same index.
    """
    by_two = sharding is Sharding.TP or sharding.divides_experts
    return runtime.rank // 2 if by_two and runtime.world_size % 2 == 0 else runtime.rank


def _explain_impossible(scenario: Scenario, runtime: Runtime, *, saves: bool) -> str:
    """Explains why the scenario cannot be built here; empty if it can."""
    if scenario.version == 1 and not runtime.has_accelerator:
        return "torch's FSDP1 needs an accelerator"
    # torch 2.6's FSDP2 calls it in the first forward, and fails in the backward too.
    if scenario.version == 2 and not runtime.has_accelerator and not hasattr(torch.cpu.Stream, "record_event"):
        return f"the FSDP2 of torch {torch.__version__} needs an accelerator"
    if scenario.sharding in (Sharding.EXPERTS, Sharding.REPLICATE) and not private.has_placements_on_meshes():
        return f"torch {torch.__version__} cannot shard a model as {scenario.sharding}, which needs torch 2.12 or newer"
    by_two = scenario.sharding in (Sharding.HSDP, Sharding.TP) or scenario.sharding.divides_experts
    if by_two and not saves and (runtime.world_size < 4 or runtime.world_size % 2):
        return f"{scenario.sharding} needs an even number of ranks, at least 4; there are {runtime.world_size}"
    if not scenario.backend.has_cpu_collectives and not runtime.has_accelerator:
        return "without an accelerator there is one backend, gloo, and no device-only group"
    if reason := scenario.contradiction or sharding.explain_no_offload(scenario.offload):
        return reason
    if scenario.model.is_custom and runtime.custom_model is None:
        return "the model 'custom' needs --model DIR"
    if reason := optimizers.explain_unsupported(scenario.optimizer, has_accelerator=runtime.has_accelerator):
        return reason
    return models.explain_unsupported(scenario.model, fused=scenario.sharding.divides_experts)
