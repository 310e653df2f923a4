"""FSDP2: everything about the ``FSDPState`` of a module under ``fully_shard``, and its ``FSDPParam``s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from fsdp_doctor.weights.fsdp.private import GradientSwitches, OpenStep, get, read_local_tensor

_SHOWN_IN_ITS_PLACE = ("_unsharded_param", "_sharded_post_forward_param")


@dataclass(frozen=True)
class Fsdp2Unit:
    """The state that ``fully_shard`` made for one module, or list of modules, that owns parameters.

    is_initialized: whether torch's lazy initialization, at the first forward, was done. state: its FSDPState.
    """

    compute_device: torch.device
    policy: OffloadPolicy
    is_initialized: bool
    state: Any

    @classmethod
    def read(cls, state: Any) -> Fsdp2Unit | None:
        """Reads a unit; None for an ``FSDPState`` whose module owns no parameter.

        ``FSDPParamGroup.device``, ``.offload_policy``, ``FSDPState._is_root``, which is None until the first forward:
        no public name says under which policy a module was sharded.
        """
        for group in _list_groups(state):
            return cls(get(group, "device"), get(group, "offload_policy"), get(state, "_is_root") is not None, state)
        return None

    @property
    def offloads(self) -> bool:
        """Returns whether it is under CPUOffloadPolicy."""
        return isinstance(self.policy, CPUOffloadPolicy)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """``FSDPState._mp_policy``; without mixed precision all of its dtypes are None."""
        policy: MixedPrecisionPolicy = get(self.state, "_mp_policy")
        return policy

    @property
    def replaced(self) -> list[tuple[nn.Module, str]]:
        """Modules and names with a different parameter than the one that the unit gathers, once it is initialized.

        ``FSDPParam._module_info``: a unit looks at its modules again in ``Module._apply`` and in a load, so what
        ``setattr`` puts there, as tying does, is gone at the next forward.
        """
        places: list[tuple[nn.Module, str]] = []
        for param in _list_params(self.state) if self.is_initialized else ():
            info = get(param, "_module_info")
            if not info.shared_modules and info.module._parameters.get(info.param_name) is param.sharded_param:
                continue
            gathered = [getattr(param, name, None) for name in ("sharded_param", *_SHOWN_IN_ITS_PLACE)]
            modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
            for module, name in zip(modules, names, strict=True):
                if not any(getattr(module, name, None) is parameter for parameter in gathered):
                    places.append((module, name))
        return places

    @property
    def tied_places(self) -> list[list[tuple[nn.Module, str]]]:
        """Modules and names for which the unit has one parameter, as tied before ``fully_shard``.

        ``ParamModuleInfo.shared_modules``. An unshard gives all of them the same parameter, whatever they have now.
        """
        infos = [get(param, "_module_info") for param in _list_params(self.state)]
        return [
            [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for info in infos
            if info.shared_modules
        ]

    @property
    def moved(self) -> list[tuple[nn.Parameter, bool]]:
        """The unit's parameters whose memory differs from the memory that it gathers from, and whether it can gather
        from it. It can where the parameter is placed as when it was sharded (``FSDPParam._sharding_spec``), in the same
        dtype (``orig_dtype``).
        """
        moved: list[tuple[nn.Parameter, bool]] = []
        for param, parameter in find_moved_parameters(self.state):
            spec = get(param, "_sharding_spec")
            is_placed = (parameter.device_mesh, parameter.placements, parameter.shape) == (  # type: ignore[attr-defined]
                spec.mesh,
                spec.placements,
                spec.shape,
            )
            is_same_dtype = parameter.dtype == get(param, "orig_dtype")
            moved.append(
                (parameter, is_placed and is_same_dtype and bool(read_local_tensor(parameter).is_contiguous()))
            )
        return moved

    def follow_moved(self) -> None:
        """Makes the unit gather from the present memory of its parameters: ``FSDPParam.reset_sharded_param``.

        As a ``load_state_dict`` of the whole model does, for which torch calls it. It also pads and pins.
        """
        for param, _ in find_moved_parameters(self.state):
            get(param, "reset_sharded_param")()

    def follow_materialized(self, parameter: nn.Parameter) -> None:
        """Makes it gather from the memory that one of its parameters was given: ``FSDPParam.reset_sharded_param``.

        ``Module.to_empty``, through which torch calls it, empties the whole model. It also pads and pins, so the
        parameter's local tensor may be another one after it.
        """
        for param in _list_params(self.state):
            if get(param, "sharded_param") is parameter:
                get(param, "reset_sharded_param")()

    @property
    def recast(self) -> list[nn.Parameter]:
        """The unit's parameters whose dtype was changed after its first forward.

        ``FSDPParam.orig_dtype``, by which it sizes its buffers and casts its gradients.
        """
        params = _list_params(self.state) if self.is_initialized else ()
        pairs = [(get(param, "sharded_param"), get(param, "orig_dtype")) for param in params]
        return [parameter for parameter, noted in pairs if parameter.dtype != noted]

    @property
    def has_pending_gather(self) -> bool:
        """True if a gather was launched whose result no forward has used: ``FSDPParamGroup._all_gather_result``.

        An explicit prefetch, ``unshard(async_op=True)``, or a step that raised leaves one.
        """
        return any(get(group, "_all_gather_result") is not None for group in _list_groups(self.state))

    @property
    def trained_together(self) -> list[list[nn.Parameter]]:
        """The unit's trainable parameters, grouped by the buffer in which their gradients are reduced."""
        groups = [[get(param, "sharded_param") for param in group.fsdp_params] for group in _list_groups(self.state)]
        return [[parameter for parameter in group if parameter.requires_grad] for group in groups]

    @property
    def switches(self) -> GradientSwitches:
        """``FSDPParamGroup`` and ``FSDPStateContext`` keep what public methods set."""
        groups = _list_groups(self.state)
        # Elsewhere than under HSDP and `replicate()` nothing reads whether it all-reduces.
        replicating = [group for group in groups if hasattr(get(group, "mesh_info"), "replicate_mesh_size")]
        return GradientSwitches(
            synchronizes=all(get(group, "reduce_grads") for group in groups),
            all_reduces=all(get(group, "all_reduce_grads") for group in replicating),
            ends=get(get(self.state, "_state_ctx"), "is_last_backward"),
            divided_by=next(filter(None, map(_read_divisor, groups)), None),
            num_ranks=max((get(group, "mesh_info").mesh.size() for group in groups), default=1),
        )


def list_states(model: nn.Module) -> list[Any]:
    """Lists the ``FSDPState`` of every FSDP2 module, each once, those whose modules own no parameter too."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for module in modules if (state := get(module, "_get_fsdp_state")())}.values())


def find_compute_device(module: FSDPModule) -> torch.device | None:
    """Returns where an FSDP2 module gathers: ``FSDPParamGroup.device``; None if it owns no parameter."""
    groups = _list_groups(get(module, "_get_fsdp_state")())
    return get(groups[0], "device") if groups else None


def find_open_step(states: Sequence[Any]) -> OpenStep | None:
    """Returns the part of a training step that has begun and has not ended; None between two steps.

    What a step that raised leaves: torch resets ``_training_state`` and the two trackers of ``FSDPStateContext`` at the
    end of a forward and of a backward alone.
    """
    stages = {get(get(holder, "_training_state"), "name") for s in states for holder in (s, *_list_groups(s))}
    contexts = [get(state, "_state_ctx") for state in states]
    if stages & {"PRE_BACKWARD", "POST_BACKWARD"} or any(c.post_backward_final_callback_queued for c in contexts):
        return "backward"
    return "forward" if "FORWARD" in stages or any(c.iter_forward_root is not None for c in contexts) else None


def close_step(states: Sequence[Any]) -> list[nn.Parameter]:
    """Brings units whose step was broken off into the state between two steps; returns the parameters whose gradients
    were discarded: those that were not reduced, which no ``zero_grad`` of an optimizer reaches.

    ``FSDPModule.reset_iter_state``, which torch has from 2.13 on, does the same and leaves these gradients, so that
    the next backward adds to them. The device must have nothing left to do.
    """
    discarded: list[nn.Parameter] = []
    for state in states:
        _return_to_idle(state)
        getattr(state, "_modules_to_run_forward", set()).clear()
        context, streams = get(state, "_state_ctx"), get(state, "_comm_ctx")
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        get(streams, "post_forward_order").clear()
        for name in ("all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "_last_post_reduce_events"):
            _empty(streams, name)
        for group in _list_groups(state):
            _return_to_idle(group)
            get(group, "_post_forward_indices").clear()
            for name in ("_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
                _empty(group, name)
            is_partly_reduced = getattr(group, "_partial_reduce_output", None) is not None
            _empty(group, "_partial_reduce_output")
            for param in group.fsdp_params:
                if _discard_gradient(param) or is_partly_reduced:
                    discarded.append(get(param, "sharded_param"))
    return discarded


def reshard(states: Sequence[Any]) -> None:
    """Waits for gathers that are pending, drops what they gathered, and frees what is unsharded, between two steps.

    ``FSDPParamGroup._all_gather_result``: the public ``reshard()`` leaves it, and the next forward uses it.
    """
    for state in states:
        for group in _list_groups(state):
            if (result := get(group, "_all_gather_result")) is not None:
                if isinstance(work := get(result, "all_gather_work"), dist.Work):
                    work.wait()
                group._all_gather_result = None
            get(group, "reshard")()


def give_memory(model: nn.Module, device: torch.device, *, pin_memory: bool) -> None:
    """Gives each sharded parameter other memory on ``device``, from which its unit gathers, and the same values.

    ``FSDPParam._sharded_param_data`` and ``to_sharded_dtensor``: ``Module.to`` gives the shard alone other memory,
    without its padding, and pageable. The parameters stay the same objects, which an optimizer has.
    """
    for param in (param for state in list_states(model) for param in _list_params(state)):
        gathered, parameter = get(param, "_sharded_param_data"), get(param, "sharded_param")
        memory = torch.empty_like(gathered, device=device, pin_memory=pin_memory).copy_(gathered)
        local = read_local_tensor(parameter)
        shard = memory.as_strided(local.size(), local.stride(), local.storage_offset())
        moved = nn.Parameter(get(param, "to_sharded_dtensor")(shard), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, moved)
        param._sharded_param_data = memory


def _return_to_idle(holder: Any) -> None:
    """``FSDPState._training_state``, and the group's: torch itself sets it at the end of a step alone."""
    stage = get(holder, "_training_state")
    holder._training_state = type(stage).IDLE


def _empty(holder: Any, name: str) -> None:
    """Empties an attribute that not every version of torch has."""
    value = getattr(holder, name, None)
    if isinstance(value, (list, dict)):
        value.clear()
    elif value is not None:
        setattr(holder, name, None)


def _discard_gradient(param: Any) -> bool:
    """``FSDPParam._unsharded_param``, whose ``grad`` autograd adds to, and ``unsharded_accumulated_grad``."""
    unsharded: torch.Tensor | None = getattr(param, "_unsharded_param", None)
    has_gradient = unsharded is not None and unsharded.grad is not None
    if unsharded is not None:
        unsharded.grad = None
    is_accumulated = get(param, "unsharded_accumulated_grad") is not None
    if is_accumulated:
        param.unsharded_accumulated_grad = None
    return has_gradient or is_accumulated


def list_unsharded_parameters(state: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yields (the parameter that an FSDP2 module shows now or showed last in place of its shard, the sharded
    parameter).

    After a forward without a backward the root still shows its parameters unsharded, in the compute dtype.
    ``FSDPParam.sharded_param``: there is no public way to the masters while they are not shown.
    """
    for param in _list_params(state):
        for shown in _SHOWN_IN_ITS_PLACE:
            if (other := getattr(param, shown, None)) is not None:
                yield other, get(param, "sharded_param")


def find_moved_parameters(state: Any) -> list[tuple[Any, nn.Parameter]]:
    """Lists (the FSDPParam, the sharded parameter) where an FSDP2 module gathers from other memory than the
    parameter's.

    ``FSDPParam._sharded_param_data`` is what it gathers, padded, and the parameter's shard a part of it. A unit looks
    for it anew in ``Module._apply``, in a load and at its first forward (``FSDPParamGroup._reset_sharded_params``), so
    memory that a parameter is given by ``torch.utils.swap_tensors``, or as ``_local_tensor``, is not used. A shard of
    another class is asked for what is gathered itself.
    """
    moved = []
    for group in _list_groups(state):
        if get(group, "_reset_sharded_params"):
            for param in group.fsdp_params[:1]:
                get(param, "_sharded_param_data"), get(param, "sharded_param")
            # There may be a hundred thousand, which each extraction looks at.
            for param in group.fsdp_params:
                local = param.sharded_param._local_tensor
                if local.data_ptr() != param._sharded_param_data.data_ptr() and local.numel():
                    moved.append((param, param.sharded_param))
    return [(param, parameter) for param, parameter in moved if type(parameter._local_tensor) is torch.Tensor]


def _list_groups(state: Any) -> list[Any]:
    """The ``FSDPParamGroup``s, none if the module owns no parameter: ``_fsdp_param_groups`` in newer versions."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [get(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def _list_params(state: Any) -> list[Any]:
    return [param for group in _list_groups(state) for param in group.fsdp_params]


def _read_divisor(group: Any) -> str | None:
    """Reads the divisor. torch 2.6 and 2.7 store an operator of NCCL instead of the factor."""
    factor = getattr(group, "gradient_divide_factor", None)
    if factor is None:
        return "another factor" if getattr(group, "reduce_scatter_reduce_op", None) is not None else None
    return f"{factor:g}"
