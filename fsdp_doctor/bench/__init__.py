"""What models of a real shape do on real devices.

benchmark   ``fsdp-doctor bench``: how fast weights are extracted or loaded, against the bandwidth of the links
rollout     ``fsdp-doctor memory rollout``: a rollout engine beside a trainer's worker
"""
