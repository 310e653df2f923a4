"""What is held on a device and its host at each stage of a job, measured or predicted, as values. No torch.

``stage_ledger`` has the classes, the stages and the records; ``ledger_file`` writes and reads them as JSON;
``ledger_table`` and ``ledger_picture`` show any of them.
"""
