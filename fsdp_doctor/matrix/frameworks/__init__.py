"""Frameworks whose own code can be run, and the cases of each."""
