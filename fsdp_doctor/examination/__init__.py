"""``examine`` and ``measure_memory`` inspect a live model on one rank for states that break training or extraction.

examine           reads the facts and the findings of one rank
facts             reads the device of each tensor
findings          finds problems in the devices of the tensors
model_findings    finds problems that a load, a changed gradient setting or an offload has left in the model
display           renders facts and findings for a terminal
live_memory       measures the memory of a live job by class
stage_watch       measures the memory by class at each stage of a job, by watching every operator
memory_records    holds memory ledgers and their JSON; needs no torch
memory_views      renders memory ledgers as a table and as a picture
"""
