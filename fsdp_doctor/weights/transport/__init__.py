"""Transport of tensors between the ranks of a sharded model, and between host and device.

sources         the tensors of the model, how each is gathered, and in which dtype; shard_places: shards' places in
    tensors
rank_groups     whether groups of ranks have the same tensor under a name, or different ones
agreement       the ranks compare plans, promise buckets, and announce that they leave
buckets         tensors that are loaded and gathered together; transfers: allocation, collectives, copies of the results
loader          brings shards to the device; deltas: merges adapters into them
host_copies     copies from pageable memory; streams: which streams wait for which
"""
