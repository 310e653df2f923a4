"""FSDP2: everything about the ``FSDPState`` of a module under ``fully_shard``, and its ``FSDPParam``s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_doctor.fsdp.private import GradientSwitches, get, read_local_tensor

_SHOWN_IN_ITS_PLACE = ("_unsharded_param", "_sharded_post_forward_param")


@dataclass(frozen=True)
class Fsdp2Unit:
    """What ``fully_shard`` made of one module, or list of modules, that owns parameters.

    is_initialized: whether torch's lazy initialization, at the first forward, was done. state: its FSDPState.
    """

    compute_device: torch.device
    policy: OffloadPolicy
    is_initialized: bool
    state: Any

    @classmethod
    def read(cls, state: Any) -> Fsdp2Unit | None:
        """None for an ``FSDPState`` whose module owns no parameter.

        ``FSDPParamGroup.device``, ``.offload_policy``, ``FSDPState._is_root``, which is None until the first forward:
        no public name says under which policy a module was sharded.
        """
        for group in _list_groups(state):
            return cls(get(group, "device"), get(group, "offload_policy"), get(state, "_is_root") is not None, state)
        return None

    @property
    def offloads(self) -> bool:
        """Whether it is under CPUOffloadPolicy."""
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
    """torch 2.6 and 2.7 keep an operator of NCCL in place of the factor."""
    factor = getattr(group, "gradient_divide_factor", None)
    if factor is None:
        return "another factor" if getattr(group, "reduce_scatter_reduce_op", None) is not None else None
    return f"{factor:g}"
