"""Reads models under torch's two FSDPs.

reader       the one reader of a model: every tensor that it holds, every FSDP1 and FSDP2 unit
snapshot     a cheap check that a model has not changed since it was read
shards       which part of a tensor a rank holds
names        the names of the unwrapped model
decorators   decorators of functions that defer garbage collection, or run the same way in every autograd mode
private      every private name of torch, with the reason for its use; fsdp1 and fsdp2: a unit of each
"""
