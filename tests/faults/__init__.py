"""Extraction functions that fail in one way each, for `--path faults.<module>:<function>`."""
