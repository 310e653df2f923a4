"""``fsdp-doctor memory plan``: predicts the memory of a job on each device and host, before it runs.

job             defines the records of a job
configured_job  reads a job from a configuration
meta_model      builds models without weights, by name or directory, and divides their parameters into FSDP units
activations     traces a forward and a backward on the meta device
training_step   simulates the allocations of a training step of FSDP1 and FSDP2 in torch's order
stages          simulates the stages of a job on one rank
job_plan        adds up the roles of a job on devices and hosts, and tries settings that make the job fit
plan_text       renders the plan as text and JSON
"""
