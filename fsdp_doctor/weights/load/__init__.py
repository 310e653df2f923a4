"""Loads full tensors, and an optimizer's state, into the existing shards of a model.

full_load          load_full_tensors: one load from its arguments to its report
optimizer_state    load_optimizer_state; optimizer_matching: compares the state in a checkpoint with the optimizer's
source             the source that the caller gives; safetensors_files: reading files and their index
source_names       whether the source has the model's names or the Hub's; fused tensors divided into parts
targets, layouts   the tensors that are filled, and how they are divided over the ranks
matching           whether source and targets fit
agreement          the ranks begin a load together, and an error of one rank is raised on all
portions           reading and writing parts of tensors; from_first_rank: loads for which only rank 0 has the source
"""

from fsdp_doctor.weights.load.full_load import load_full_tensors
from fsdp_doctor.weights.load.optimizer_state import load_optimizer_state
from fsdp_doctor.weights.load.outcome import LoadError, LoadReport

__all__ = ["LoadError", "LoadReport", "load_full_tensors", "load_optimizer_state"]
