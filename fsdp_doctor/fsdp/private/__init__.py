"""Every private name of torch that the project uses, and nothing else.

Each function says for what there is no public API. Read in the source, and run, on the versions
in ``CHECKED``; where a name is gone, :class:`PrivateApiGone` says which and for which torch.
"""

from __future__ import annotations

from fsdp_doctor.fsdp.private.access import (
    CHECKED as CHECKED,
)
from fsdp_doctor.fsdp.private.access import (
    PrivateApiGone as PrivateApiGone,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    compute_device as compute_device,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_handle as flat_handle,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_layout as flat_layout,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_names as flat_names,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_param_to as flat_param_to,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_parameter as flat_parameter,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    flat_shard as flat_shard,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    fsdp1_lazy_init as fsdp1_lazy_init,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    host_gradient as host_gradient,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    is_flat_parameter as is_flat_parameter,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    is_initialized as is_initialized,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    is_sharded as is_sharded,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    is_summoned as is_summoned,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    keeps_originals as keeps_originals,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    module_views as module_views,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    offloads_parameters as offloads_parameters,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    original_parameters as original_parameters,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    original_shapes as original_shapes,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    replica_group as replica_group,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    reshard_flat as reshard_flat,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    shard_group as shard_group,
)
from fsdp_doctor.fsdp.private.flat_handles import (
    shard_padding as shard_padding,
)
from fsdp_doctor.fsdp.private.gradient_switches import (
    GradientSwitches as GradientSwitches,
)
from fsdp_doctor.fsdp.private.gradient_switches import (
    fsdp1_switches as fsdp1_switches,
)
from fsdp_doctor.fsdp.private.gradient_switches import (
    fsdp2_switches as fsdp2_switches,
)
from fsdp_doctor.fsdp.private.of_torch import (
    ITEM as ITEM,
)
from fsdp_doctor.fsdp.private.of_torch import (
    MODULE_CALL as MODULE_CALL,
)
from fsdp_doctor.fsdp.private.of_torch import (
    WRAPPER_NAMES as WRAPPER_NAMES,
)
from fsdp_doctor.fsdp.private.of_torch import (
    OperatorMode as OperatorMode,
)
from fsdp_doctor.fsdp.private.of_torch import (
    OwnTensors as OwnTensors,
)
from fsdp_doctor.fsdp.private.of_torch import (
    all_gather as all_gather,
)
from fsdp_doctor.fsdp.private.of_torch import (
    compiled_module as compiled_module,
)
from fsdp_doctor.fsdp.private.of_torch import (
    copy_all as copy_all,
)
from fsdp_doctor.fsdp.private.of_torch import (
    default_store as default_store,
)
from fsdp_doctor.fsdp.private.of_torch import (
    follow_materialized as follow_materialized,
)
from fsdp_doctor.fsdp.private.of_torch import (
    fsdp2_precision as fsdp2_precision,
)
from fsdp_doctor.fsdp.private.of_torch import (
    fsdp2_unit as fsdp2_unit,
)
from fsdp_doctor.fsdp.private.of_torch import (
    has_backend_for as has_backend_for,
)
from fsdp_doctor.fsdp.private.of_torch import (
    has_placements_on_meshes as has_placements_on_meshes,
)
from fsdp_doctor.fsdp.private.of_torch import (
    hooks_of_a_step as hooks_of_a_step,
)
from fsdp_doctor.fsdp.private.of_torch import (
    is_sharded_tensor as is_sharded_tensor,
)
from fsdp_doctor.fsdp.private.of_torch import (
    local_tensor as local_tensor,
)
from fsdp_doctor.fsdp.private.of_torch import (
    modules_and_tensors as modules_and_tensors,
)
from fsdp_doctor.fsdp.private.of_torch import (
    num_interleaved as num_interleaved,
)
from fsdp_doctor.fsdp.private.of_torch import (
    own_tensors as own_tensors,
)
from fsdp_doctor.fsdp.private.of_torch import (
    placed_as as placed_as,
)
from fsdp_doctor.fsdp.private.of_torch import (
    placement_on as placement_on,
)
from fsdp_doctor.fsdp.private.of_torch import (
    recast_parameters as recast_parameters,
)
from fsdp_doctor.fsdp.private.of_torch import (
    release_workspaces as release_workspaces,
)
from fsdp_doctor.fsdp.private.of_torch import (
    replaced_parameters as replaced_parameters,
)
from fsdp_doctor.fsdp.private.of_torch import (
    replicate as replicate,
)
from fsdp_doctor.fsdp.private.of_torch import (
    trained_together as trained_together,
)
from fsdp_doctor.fsdp.private.of_torch import (
    unsharded_parameters as unsharded_parameters,
)
from fsdp_doctor.fsdp.private.of_torch import (
    views_like as views_like,
)
from fsdp_doctor.fsdp.private.of_torch import (
    weak_reference as weak_reference,
)
