"""``fsdp-doctor resume`` checks that a user's program continues from its checkpoint exactly as without interruption.

recorder       runs in the job's processes, and records the state before each optimizer step
emulation      runs in the job's processes on the emulated device
records        reads the records of a run
runs           starts the job without interruption and resumed, and ends it
comparison     compares two runs of one rank, and finds which other state a wrong value equals
causes         reads the known causes, ``causes.toml``
diagnosis      runs the job, compares the runs, separates causes from effects, and makes the answer
answer         renders the answer as text, Markdown and JSON

Only ``recorder`` and ``emulation`` import torch, and only the job's processes import these two modules.
"""
