"""The pytest plugin: marks, the hooks, and the ranks that run the marked tests."""

# The name of the plugin that asks ranks to run tests or, in a rank, of the one that runs them.
REGISTERED_AS = "fsdp-doctor-ranks"
