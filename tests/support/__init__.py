"""Code that tests share: it starts processes, and makes the models and files that they use."""
