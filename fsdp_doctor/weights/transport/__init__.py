"""Tensors on their way: between the ranks of a sharded model, and between host and device.

sources         the tensors of the model, how each is gathered, and in which dtype; shard_places: its place in the whole
rank_groups     whether groups of ranks have one tensor under a name, or several
agreement       the ranks compare plans, promise buckets, and say when they leave
buckets         what is loaded and gathered together; transfers: allocation, collectives, copies out of them
loader          brings shards to the device; deltas: merges adapters into them
host_copies     copies out of pageable memory; streams: what waits for what
"""
