"""Reads models under torch's two FSDPs.

reader       the one reader of a model: every tensor that it holds, every unit of either FSDP
snapshot     a cheap look whether a model is still what it was when it was read
shards       which part of a tensor a rank holds
names        the names of the unwrapped model
decorators   functions that run without a garbage collection, or alike in every autograd mode
private      every private name of torch, with its reason; fsdp1 and fsdp2: a unit of each
"""
