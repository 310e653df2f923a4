"""``fsdp-doctor resume``: is the run that a user's program resumes the run that it would have been?

recorder       runs there, and writes what each optimizer step starts from
emulation      runs there, too, for a job on the emulated device
records        what is written, read back
runs           starts the job, once straight through and once resumed, and ends it
comparison     of two runs: the first things that differ on a rank, and what they equal instead
causes         the known causes, ``causes.toml``
diagnosis      the whole: runs, comparison, effects apart from causes, the answer
answer         the answer as text, Markdown and JSON

This module imports no torch; ``recorder`` and ``emulation`` do, which only the job's processes import.
"""
