"""Code that tests share: how they start processes, and what they build in them."""
