"""Reads models under torch's two FSDPs.

reader         reads a model: every tensor that it holds, and every FSDP1 and FSDP2 unit
snapshot       a cheap check that a model has not changed since it was read
shards         the part of a tensor that a rank holds
expert_groups  experts that were divided over ranks before FSDP sharded them
given_tensors  tensors that a caller gives instead of the model's own
forms          tensors whose memory does not hold their values, such as quantized weights
dtypes         names of dtypes
strides        strides of contiguous tensors
decorators     decorators that set the device and the autograd mode, or defer garbage collection
private        every private name of torch that is used, with the reason; its modules fsdp1 and fsdp2 read FSDP's units
"""
