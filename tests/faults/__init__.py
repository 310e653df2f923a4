"""Extraction functions that fail in one way each, for `--method faults.<module>:<function>`."""
