"""The way in: full tensors, and an optimizer's state, into a sharded model, in every state that the matrix knows.

Each rank's shard is filled where it lies: the model is never moved, and nothing of it is replaced.

    targets              what there is to fill, and where this rank's part of it lies
    layouts              how a tensor is divided over the ranks
    given, checks        what the source has, and whether that fits
    safetensors_files    reading a part of a file; checkpoint_index says which tensor is in which, same_files whether
                         each rank has the same
    portions             a part of a full tensor, in bytes
    together             the ranks agree on a load, and an error of one is an error of all
    own_parts            where every rank has the source
    from_first_rank      where rank 0 alone has it
    writing              one load, by one of these ways
    full_load            load_full_tensors
    optimizer_state      load_optimizer_state; optimizer_checkpoint, optimizer_parameters and optimizer_matching say
                         what the source and the optimizer have, and whether that fits
"""

from fsdp_doctor.load.full_load import load_full_tensors
from fsdp_doctor.load.optimizer_state import load_optimizer_state
from fsdp_doctor.load.outcome import LoadError, LoadReport

__all__ = ["LoadError", "LoadReport", "load_full_tensors", "load_optimizer_state"]
