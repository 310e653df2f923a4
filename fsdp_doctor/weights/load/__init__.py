"""Loads full tensors, and an optimizer's state, into the shards of a model, where they lie.

full_load          load_full_tensors: one load from its arguments to its report
optimizer_state    load_optimizer_state; optimizer_matching: what the checkpoint has against what the optimizer has
source             what the caller gives; safetensors_files: reading files and their index
source_names       the model's names or the Hub's; a fused tensor as its parts
targets, layouts   what is filled, and how it is divided over the ranks
matching           whether source and targets fit
agreement          the ranks agree on a load, and an error of one is an error of all
portions           reading and writing parts of tensors; from_first_rank: where rank 0 alone has the source
"""

from fsdp_doctor.weights.load.full_load import load_full_tensors
from fsdp_doctor.weights.load.optimizer_state import load_optimizer_state
from fsdp_doctor.weights.load.outcome import LoadError, LoadReport

__all__ = ["LoadError", "LoadReport", "load_full_tensors", "load_optimizer_state"]
