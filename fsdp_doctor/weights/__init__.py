"""Everything that works on the weights of a live model, in eight rooms, each of which may import those before it.

fsdp           what is known of torch's two FSDPs: the one reader of a sharded model, and every private name of torch
transport      tensors on their way between ranks, between host and device: agreement, buckets, collectives, streams
names          the names that a model's tensors have on the Hub, asked of transformers
extract        full tensors and local shards out of a sharded model
load           full tensors into a sharded model, and its optimizer's state
fingerprints   128 bits for each tensor, and the differences
save           a sharded model and its optimizer as files, each rank its own rows
engines        weights in the form that an inference engine takes
"""
