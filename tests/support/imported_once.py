"""What every rank needs: the fork server imports it, and no rank that is forked from it has to."""

import importlib

from fsdp_doctor.probe.worker import import_what_cases_need

for _module in (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "support.ranks",
    "fsdp_doctor.cli.app",
    "fsdp_doctor.cli.probe_command",
    "fsdp_doctor.probe.command",
    "fsdp_doctor.probe.worker_process",
):
    importlib.import_module(_module)
# And leaves all of it out of the ranks' collections of garbage.
import_what_cases_need()
