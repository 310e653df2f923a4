"""``fsdp-doctor plan``: what a job will hold on each device and host at each of its stages, before it runs.

model_shape    the parameters of a model by FSDP unit, from its configuration, on the meta device
activations    what a forward and a backward hold, counted while the model runs on the meta device
rank_shards    what one rank has of each unit
timeline       a device's memory while a stage is replayed: held by class, and the highest moment
fsdp2_step     a training step of FSDP2 as allocations, in torch's order; fsdp1_step that of FSDP1
extractions    what each path gathers at once
life           the stages of a job, replayed one after the other
host           the host's memory: pinned powers of two, checkpoints, state dicts
engine         the rollout engine that shares the devices
settings       what a configuration says of all this; framework_sizes where each framework says it
advice         the one setting that brings the highest stage under the limit, and its cost
outlook        the plan of a whole job, as values; plan_text shows it
"""
