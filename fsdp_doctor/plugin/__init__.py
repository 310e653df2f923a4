"""The pytest plugin: marks, hooks, and the ranks that run the marked tests."""

# The name of the plugin that asks ranks to run tests, and in a rank the name of the plugin that runs them.
REGISTERED_AS = "fsdp-doctor-ranks"
