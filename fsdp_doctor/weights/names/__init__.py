"""The names that a model's tensors have on the Hub, and which part of which of the model's tensors each name is.

views          a tensor as a part of another: where it lies, and what of it is in a rank's shard
hub_names      the names, asked of transformers or given by the caller
output_names   the names under which tensors are handed out
"""

from fsdp_doctor.weights.names.hub_names import (
    HubNamesUnknown,
    ModelClassUnknown,
    Names,
    read_hub_parts,
    read_hub_view,
    read_parameter_order,
)
from fsdp_doctor.weights.names.views import NamesError, TensorView

__all__ = [
    "HubNamesUnknown",
    "ModelClassUnknown",
    "Names",
    "NamesError",
    "TensorView",
    "read_hub_parts",
    "read_hub_view",
    "read_parameter_order",
]
