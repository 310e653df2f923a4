"""``fsdp-doctor memory plan``: predicts the memory of a job on each device and host, before it runs.

job             the records of a job
configured_job  reads a job from a configuration
meta_model      models without weights, by name or directory, and their parameters by FSDP unit
activations     traces a forward and a backward on the meta device
training_step   replays a training step of FSDP1 and FSDP2 in torch's order
stages          replays the stages of a job on one rank
job_plan        joins the roles of a job on devices and hosts, and tries settings that make it fit
plan_text       the plan as text and JSON
"""
