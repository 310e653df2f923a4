"""A benchmark of published silent errors, and of clean programs beside them: ``python -m benchmarks.silent``."""
