"""Several versions of torch and of the frameworks: their reports as one, and what changed between them. No torch."""
