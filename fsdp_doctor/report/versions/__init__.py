"""Reports of several versions of torch and of the frameworks: merges them, and finds what changed between versions.

Imports no torch.
"""
