"""``fsdp-doctor bench``: how fast weights leave a sharded model, against what the links can carry.

options   what is measured: the model, its offload, its dtypes, the paths
model     a model of a real shape, sharded and filled on each rank
links     the ceilings: copies from and to the host, the all-gather
paths     what is compared: ours, the frameworks', the user's
measure   the clock and the memory counter
report    the table and the JSON
run       all of it in order, on every rank
"""
