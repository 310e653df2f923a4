"""Weights of a live model, in eight subpackages; each may import the subpackages before it.

fsdp           torch's two FSDPs: the one reader of a sharded model, and every private name of torch
transport      transfers between ranks and between host and device: agreement, buckets, collectives, streams
names          the names that a model's tensors have on the Hub, determined with transformers
extract        full tensors and local shards out of a sharded model
load           full tensors into a sharded model, and its optimizer's state
fingerprints   128 bits for each tensor, and the differences between two fingerprints
save           a sharded model and its optimizer as files, to which each rank writes its own rows
engines        weights in the forms that inference engines take
"""
