"""The frameworks whose own code can be run, and what there is to try of each."""
