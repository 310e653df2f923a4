"""``fsdp-doctor resume`` checks that a user's program continues from its checkpoint exactly as without interruption.

recorder       runs in the job's processes, and records the state before each optimizer step
emulation      runs in the job's processes on the emulated device
records        reads the records of a run
runs           runs the job without interruption or resumed, until a given step
comparison     compares two runs of one rank, and finds the step, parameter or rank that a wrong value belongs to
causes         reads the known causes, ``causes.toml``
diagnosis      runs the job, compares the runs, separates causes from effects, and makes the answer
answer         renders the answer as text, Markdown and JSON

Only ``recorder`` and ``emulation`` import torch, and only the job's processes import these two modules.
"""
