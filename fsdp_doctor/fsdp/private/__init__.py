"""Every private name of torch that the project uses, and nothing else.

Each function says for what there is no public API. Read in the source, and run, on the versions
in ``CHECKED``; where a name is gone, :class:`PrivateApiGone` says which and for which torch.
"""

from __future__ import annotations

from fsdp_doctor.fsdp.private.access import (
    CHECKED as CHECKED,
    PrivateApiGone as PrivateApiGone,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    PlaceInModule as PlaceInModule,
    attributes_with_weights as attributes_with_weights,
    compute_device as compute_device,
    flat_handle as flat_handle,
    flat_layout as flat_layout,
    flat_memories as flat_memories,
    flat_names as flat_names,
    flat_param_to as flat_param_to,
    flat_parameter as flat_parameter,
    flat_shard as flat_shard,
    fsdp1_lazy_init as fsdp1_lazy_init,
    host_gradient as host_gradient,
    is_flat_parameter as is_flat_parameter,
    is_flattened as is_flattened,
    is_initialized as is_initialized,
    is_same_memory as is_same_memory,
    is_sharded as is_sharded,
    is_summoned as is_summoned,
    keeps_originals as keeps_originals,
    module_views as module_views,
    offloads_parameters as offloads_parameters,
    original_parameters as original_parameters,
    original_shapes as original_shapes,
    replica_group as replica_group,
    reshard_flat as reshard_flat,
    shard_group as shard_group,
    shard_padding as shard_padding,
    unite_memories as unite_memories,
)
from fsdp_doctor.fsdp.private.gradient_switches import (
    GradientSwitches as GradientSwitches,
    fsdp1_switches as fsdp1_switches,
    fsdp2_switches as fsdp2_switches,
)
from fsdp_doctor.fsdp.private.of_torch import (
    ITEM as ITEM,
    MODULE_CALL as MODULE_CALL,
    WRAPPER_NAMES as WRAPPER_NAMES,
    OperatorMode as OperatorMode,
    OwnTensors as OwnTensors,
    all_gather as all_gather,
    can_follow as can_follow,
    compiled_module as compiled_module,
    copy_all as copy_all,
    default_store as default_store,
    follow_materialized as follow_materialized,
    follow_moved as follow_moved,
    fsdp2_precision as fsdp2_precision,
    fsdp2_unit as fsdp2_unit,
    has_backend_for as has_backend_for,
    has_placements_on_meshes as has_placements_on_meshes,
    hooks_of_a_step as hooks_of_a_step,
    is_sharded_tensor as is_sharded_tensor,
    local_tensor as local_tensor,
    modules_and_tensors as modules_and_tensors,
    moved_parameters as moved_parameters,
    num_interleaved as num_interleaved,
    own_tensors as own_tensors,
    placed_as as placed_as,
    placement_on as placement_on,
    recast_parameters as recast_parameters,
    release_workspaces as release_workspaces,
    replaced_parameters as replaced_parameters,
    replicate as replicate,
    trained_together as trained_together,
    unsharded_parameters as unsharded_parameters,
    views_like as views_like,
    weak_reference as weak_reference,
)
