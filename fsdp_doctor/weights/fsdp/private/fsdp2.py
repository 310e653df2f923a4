"""FSDP2: every use of the ``FSDPState`` of a module under ``fully_shard``, and of its ``FSDPParam`` objects."""

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
    """State that ``fully_shard`` made for one module, or list of modules, that owns parameters.

    is_initialized: whether torch's lazy initialization, at the first forward, has run.
    state: the ``FSDPState``.
    """

    compute_device: torch.device
    policy: OffloadPolicy
    is_initialized: bool
    state: Any

    @classmethod
    def read(cls, state: Any) -> Fsdp2Unit | None:
        """Reads a unit; returns None for an ``FSDPState`` whose module owns no parameter.

        Private: ``FSDPParamGroup.device`` and ``.offload_policy``, because no public name gives the policy under which
        a module was sharded; ``FSDPState._is_root``, which is None until the first forward.
        """
        for group in _list_groups(state):
            return cls(get(group, "device"), get(group, "offload_policy"), get(state, "_is_root") is not None, state)
        return None

    @property
    def offloads(self) -> bool:
        """True if the unit is under CPUOffloadPolicy."""
        return isinstance(self.policy, CPUOffloadPolicy)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Mixed-precision policy; without mixed precision all of its dtypes are None.

        Private: ``FSDPState._mp_policy``.
        """
        policy: MixedPrecisionPolicy = get(self.state, "_mp_policy")
        return policy

    @property
    def replaced(self) -> list[tuple[nn.Module, str]]:
        """Pairs (module, name) whose present parameter is not the one that the unit gathers; empty before lazy
        initialization.

        A unit looks for new parameters only in ``Module._apply`` and in a load. A parameter that was assigned with
        ``setattr``, for example to tie it, is therefore gone at the next forward. Private: ``FSDPParam._module_info``.
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
        """Groups of (module, name) pairs that were tied before ``fully_shard``; the unit has one parameter for each
        group.

        An unshard assigns this parameter to all pairs of the group, whatever they have now. Private:
        ``ParamModuleInfo.shared_modules``.
        """
        infos = [get(param, "_module_info") for param in _list_params(self.state)]
        return [
            [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for info in infos
            if info.shared_modules
        ]

    @property
    def moved(self) -> list[tuple[nn.Parameter, bool]]:
        """Pairs (parameter, whether the unit can gather it) for parameters in other memory than the unit gathers now.

        The unit can gather a parameter from its new memory if the parameter is placed as when it was sharded
        (``FSDPParam._sharding_spec``), has the same dtype (``orig_dtype``), and is contiguous.
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
        """Makes the unit gather from the present memory of its parameters, and pads and pins that memory.

        torch does the same at a ``load_state_dict`` of the whole model. Private: ``FSDPParam.reset_sharded_param``.
        """
        for param, _ in find_moved_parameters(self.state):
            get(param, "reset_sharded_param")()

    def follow_materialized(self, parameter: nn.Parameter) -> None:
        """Makes the unit gather from the new memory of one of its parameters, and pads and pins that memory.

        The parameter's local tensor may be another tensor afterwards. Private: ``FSDPParam.reset_sharded_param``,
        because ``Module.to_empty``, through which torch calls it, empties the whole model.
        """
        for param in _list_params(self.state):
            if get(param, "sharded_param") is parameter:
                get(param, "reset_sharded_param")()

    @property
    def recast(self) -> list[nn.Parameter]:
        """Parameters of the unit whose dtype was changed after its first forward.

        The unit still sizes its buffers and casts its gradients by the earlier dtype. Private:
        ``FSDPParam.orig_dtype``.
        """
        params = _list_params(self.state) if self.is_initialized else ()
        pairs = [(get(param, "sharded_param"), get(param, "orig_dtype")) for param in params]
        return [parameter for parameter, noted in pairs if parameter.dtype != noted]

    @property
    def has_pending_gather(self) -> bool:
        """True if an all-gather was launched and no forward has used its result.

        Private: ``FSDPParamGroup._all_gather_result``. An explicit prefetch, ``unshard(async_op=True)``, or a step that
        raised leaves an all-gather pending.
        """
        return any(get(group, "_all_gather_result") is not None for group in _list_groups(self.state))

    @property
    def trained_together(self) -> list[list[nn.Parameter]]:
        """Trainable parameters of the unit, grouped by the buffer in which their gradients are reduced."""
        groups = [[get(param, "sharded_param") for param in group.fsdp_params] for group in _list_groups(self.state)]
        return [[parameter for parameter in group if parameter.requires_grad] for group in groups]

    @property
    def switches(self) -> GradientSwitches:
        """Settings of the gradient reduction, which ``FSDPParamGroup`` and ``FSDPStateContext`` keep after public
        methods set them.
        """
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
    """Lists the ``FSDPState`` of every FSDP2 module, each once, also of modules that own no parameter."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for module in modules if (state := get(module, "_get_fsdp_state")())}.values())


def find_compute_device(module: FSDPModule) -> torch.device | None:
    """Returns the device on which an FSDP2 module gathers its parameters; None if it owns no parameter.

    Private: ``FSDPParamGroup.device``.
    """
    groups = _list_groups(get(module, "_get_fsdp_state")())
    return get(groups[0], "device") if groups else None


def find_open_step(states: Sequence[Any]) -> OpenStep | None:
    """Returns the part of a training step that has begun and has not ended; None between two steps.

    A step that raised leaves such a state, because torch resets ``_training_state`` and the two trackers of
    ``FSDPStateContext`` only at the end of a forward or a backward.
    """
    stages = {get(get(holder, "_training_state"), "name") for s in states for holder in (s, *_list_groups(s))}
    contexts = [get(state, "_state_ctx") for state in states]
    if stages & {"PRE_BACKWARD", "POST_BACKWARD"} or any(c.post_backward_final_callback_queued for c in contexts):
        return "backward"
    return "forward" if "FORWARD" in stages or any(c.iter_forward_root is not None for c in contexts) else None


def close_step(states: Sequence[Any]) -> list[nn.Parameter]:
    """Resets units to the idle state between two steps, after a step that was not completed.

    Discards gradients that were not reduced, which no ``zero_grad`` of an optimizer reaches, and returns their
    parameters. ``FSDPModule.reset_iter_state``, in torch 2.13 and newer, does the same but keeps these gradients, so
    that the next backward adds to them. The device must have no work left.
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
    """Waits for pending gathers, drops their results, and frees the unsharded parameters, between two steps.

    Private: ``FSDPParamGroup._all_gather_result``, because the public ``reshard()`` leaves it, and the next forward
    uses it.
    """
    for state in states:
        for group in _list_groups(state):
            if (result := get(group, "_all_gather_result")) is not None:
                if isinstance(work := get(result, "all_gather_work"), dist.Work):
                    work.wait()
                group._all_gather_result = None
            get(group, "reshard")()


def give_memory(model: nn.Module, device: torch.device, *, pin_memory: bool) -> None:
    """Gives each sharded parameter new memory on ``device`` with the same values; the unit then gathers from this
    memory.

    The parameters stay the same objects, because an optimizer refers to them. Private:
    ``FSDPParam._sharded_param_data`` and ``to_sharded_dtensor``, because the new memory that ``Module.to`` gives has no
    padding and is not pinned.
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
    """Sets ``_training_state`` of an ``FSDPState`` or its group to idle, which torch does only at the end of a step."""
    stage = get(holder, "_training_state")
    holder._training_state = type(stage).IDLE


def _empty(holder: Any, name: str) -> None:
    """Clears the attribute ``name``, or sets it to None; does nothing if this version of torch does not have it."""
    value = getattr(holder, name, None)
    if isinstance(value, (list, dict)):
        value.clear()
    elif value is not None:
        setattr(holder, name, None)


def _discard_gradient(param: Any) -> bool:
    """Discards a parameter's gradient that was not reduced; returns whether there was one.

    Private: ``FSDPParam._unsharded_param``, to whose ``grad`` autograd adds, and ``unsharded_accumulated_grad``.
    """
    unsharded: torch.Tensor | None = getattr(param, "_unsharded_param", None)
    has_gradient = unsharded is not None and unsharded.grad is not None
    if unsharded is not None:
        unsharded.grad = None
    is_accumulated = get(param, "unsharded_accumulated_grad") is not None
    if is_accumulated:
        param.unsharded_accumulated_grad = None
    return has_gradient or is_accumulated


def list_unsharded_parameters(state: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yields (unsharded, sharded) for each parameter that a module has, or had last, in its unsharded form.

    After a forward without a backward, the root still has unsharded parameters, in the compute dtype. Private:
    ``FSDPParam.sharded_param``, because no public name gives the sharded parameters while the modules have unsharded
    ones.
    """
    for param in _list_params(state):
        for shown in _SHOWN_IN_ITS_PLACE:
            if (other := getattr(param, shown, None)) is not None:
                yield other, get(param, "sharded_param")


def find_moved_parameters(state: Any) -> list[tuple[Any, nn.Parameter]]:
    """Lists (FSDPParam, sharded parameter) for each parameter whose memory is not the memory that its unit gathers.

    A unit gathers ``FSDPParam._sharded_param_data``, which is padded; normally the parameter's shard is a part of it.
    The unit updates ``_sharded_param_data`` in ``Module._apply``, in a load and at its first forward
    (``FSDPParamGroup._reset_sharded_params``), so the unit ignores memory that a parameter is given by
    ``torch.utils.swap_tensors`` or as ``_local_tensor``. If the shard is a tensor subclass, the subclass says which
    memory is gathered.
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
    """Returns the ``FSDPParamGroup`` objects of a state; empty if the module owns no parameter.

    Private: ``_fsdp_param_groups``; older versions have ``_fsdp_param_group``.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [get(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def _list_params(state: Any) -> list[Any]:
    return [param for group in _list_groups(state) for param in group.fsdp_params]


def _read_divisor(group: Any) -> str | None:
    """Reads the factor by which gradients are divided, as text; None if none was set.

    torch 2.6 and 2.7 store an operator of NCCL instead, for which the text is ``another factor``.
    """
    factor = getattr(group, "gradient_divide_factor", None)
    if factor is None:
        return "another factor" if getattr(group, "reduce_scatter_reduce_op", None) is not None else None
    return f"{factor:g}"
