"""What is not read, each refused for what it is: OpenRLHF, DeepSpeed, Megatron-LM; a script with torch's own calls.

Read in OpenRLHF at v0.11.2 (every trainer of it makes a DeepspeedStrategy), and in DeepSpeed's configuration schema.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp_doctor.check.frameworks.framework import Framework, Given, ModelReading, ModelSettings, another_engine
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.python_calls import TORCH
from fsdp_doctor.check.settings import Settings, Unreadable


def _script(settings: Settings) -> str:
    row = settings.first(f"{LAUNCH}.script")
    return str(row.value) if row else ""


def _of_openrlhf(settings: Settings) -> bool:
    return _script(settings).startswith("openrlhf") or "/openrlhf/" in _script(settings)


def _of_deepspeed(settings: Settings) -> bool:
    launched = settings.first(f"{LAUNCH}.program")
    asked = settings.first("deepspeed")
    return (
        bool(settings.below("zero_optimization"))
        or (launched is not None and launched.value == "deepspeed" and "fsdp" not in settings)
        or (asked is not None and bool(asked.value) and "fsdp" not in settings)
    )


def _of_megatron(settings: Settings) -> bool:
    return any(key in settings for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"))


def _other(name: str, recognises: Callable[[Settings], bool], why: str) -> Framework:
    return Framework(
        name=name,
        read_in="every version",
        recognises=recognises,
        models=lambda settings, given: another_engine("model", why),
    )


def _unreadable() -> ModelReading:
    raise Unreadable(
        "the script calls torch's FSDP itself, and what it does then only running it would show: "
        "fsdp_doctor.examine(model) tells it of the live model"
    )


def _of_script(settings: Settings, given: Given) -> list[ModelSettings]:
    return [ModelSettings(role="model", sections=(), keys=(), read=_unreadable)]


OPENRLHF = _other("OpenRLHF", _of_openrlhf, "OpenRLHF trains with DeepSpeed")
DEEPSPEED = _other("DeepSpeed", _of_deepspeed, "DeepSpeed trains")
MEGATRON = _other("Megatron-LM", _of_megatron, "Megatron-LM trains")
PLAIN_TORCH = Framework(
    name="a script with torch's own FSDP",
    read_in="every version",
    recognises=lambda settings: bool(settings.below(TORCH)),
    models=_of_script,
)
