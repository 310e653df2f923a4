"""``fsdp-doctor bench``: how fast weights are extracted or loaded, against the bandwidth of the links."""
