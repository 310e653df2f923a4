"""What the doctor knows of torch's two FSDPs.

reader               the one reader of a model: every tensor that it holds, every FSDP1 unit
shards               which part of a tensor a rank holds
names                the names of the unwrapped model
private              every private name of torch, with its reason
garbage_collection   kept off while a model is read
"""
