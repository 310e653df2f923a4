"""A benchmark of silent errors: published ones, and clean programs beside them. ``python -m benchmarks.silent``."""
