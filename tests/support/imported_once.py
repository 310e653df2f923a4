"""Imports the modules that every rank needs in the fork server, so that no forked rank has to import them."""

import importlib

from fsdp_doctor.machine import imports
from fsdp_doctor.probe.worker import import_what_cases_need

_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "support.ranks",
    "fsdp_doctor.cli.app",
    "fsdp_doctor.cli.probe",
    "fsdp_doctor.probe.command",
    "fsdp_doctor.probe.workers",
)
with imports.freeze_imports():
    for _module in _MODULES:
        importlib.import_module(_module)
    import_what_cases_need()
