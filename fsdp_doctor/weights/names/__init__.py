"""Names that a model's tensors have on the Hub, and the part of a model's tensor that each name stands for.

views          a tensor as a part of another: its indices, and which of them a rank's shard holds
hub_names      the Hub's names, determined with transformers or given by the caller
output_names   the names under which tensors are yielded
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
