"""Ledgers: the memory of one rank at one stage of a job, measured or predicted, as values. No torch.

ledger has the records and their JSON; ledger_views shows them as a table and as a picture.
"""
