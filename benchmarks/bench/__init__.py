"""Measures how fast weights are extracted or loaded, next to the links' bandwidth. Used by benchmarks/weights.py."""
