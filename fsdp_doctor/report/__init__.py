"""The report of a run: typed records, their file, and the formats made from them. No module here imports torch."""
