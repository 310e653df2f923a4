"""``fsdp-doctor memory plan``: what a job will hold on each device and host at each of its stages, before it runs.

named_shapes     models by name
meta_model       a model from its configuration, on the meta device; model_shape its parameters by FSDP unit
activations      what a forward and a backward hold, counted while it runs there; fused_attention is attention's part
role_setup       how one model is held and trained; job_setup that, the engine and the machines
framework_sizes  where each framework says how much is computed at once; planned_job reads a configuration
rank_shards      what one rank has of each unit
timeline         a device's memory while a stage is replayed: held by class, and the highest moment
training_step    forward and backward around what fsdp1_step and fsdp2_step allocate, in torch's order
extractions      what each path gathers at once
life             the stages of a job, replayed one after the other; prediction does so for a model and a setup
outlook          a whole job: its roles, and what shares a device; host is the memory of a node
advice           the one setting that makes it fit, and its cost
plan_text        all of it as text
"""
