"""``examine`` and ``measure_memory``: a live model on one rank, and what of it breaks training or extraction.

examine           the facts and the findings of one rank
facts             where each tensor lies
findings          what that means; model_findings: what a load, switches or an offload have left
display           both for a terminal
live_memory       measures the memory of a live job by class
stage_watch       measures it at each stage of a job, by watching every operator
memory_records    a memory ledger as values and as JSON, no torch; memory_views: as a table and as a picture
"""
