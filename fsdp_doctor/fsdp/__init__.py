"""What the doctor knows of torch's two FSDPs: sharding, verl's manual offload, shards, paths."""
