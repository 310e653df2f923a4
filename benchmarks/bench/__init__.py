"""Measures how fast weights are extracted or loaded, compared with the links' bandwidth. Used by benchmarks/weights.py.
"""
