"""``fsdp-doctor bench``: how fast weights leave, or enter, a sharded model, against the bandwidth of the links."""
