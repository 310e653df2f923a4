"""The scripts of ``examples/findings`` whose findings a fix mends."""

from __future__ import annotations

# The name of a fix, the script of a finding that it mends, and the adapter whose shims the script needs without a GPU.
SCRIPTS = (
    ("peft-fsdp1-adapter", "peft_adapter_of_fsdp1_is_empty", "accelerate"),
    ("accelerate-full-load", "accelerate_fsdp2_buffer_breaks_full_load_state", "accelerate"),
    ("accelerate-full-load", "accelerate_fsdp1_adapter_is_not_loaded", "accelerate"),
    ("accelerate-fsdp1-optimizer", "accelerate_fsdp1_sharded_resume_loses_optimizer", "accelerate"),
    ("lightning-offload", "lightning_fsdp2_cpu_offload_fails", "lightning"),
    ("lightning-consolidation", "lightning_fsdp2_consolidate_fails", "lightning"),
    ("trainer-offload-params", "trainer_ignores_fsdp_offload_params", "trainer"),
    ("transformers-offload", "transformers_fsdp_cpu_offload_cannot_train", "transformers"),
)
