"""``fsdp-doctor bench``: how fast weights leave, or enter, a sharded model, against what the links can carry.

request        what is measured: the model, its offload, its dtypes, the paths
sharded_model  a model of a real shape, sharded and filled on each rank
links          the ceilings: copies from, to and within the host, the all-gather, the page cache
candidates     what is compared on the way out: ours, the frameworks', the user's
way_in         what is compared on the way in, and its measurement
measure        the clock and the memory counter
tables         the table and the JSON
benchmark      all of it in order, on every rank
"""
