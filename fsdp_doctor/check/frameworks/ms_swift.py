"""ms-swift: ``--fsdp`` of its command line: ``fsdp2``, a JSON text, or a JSON file.

Read in ms-swift at v3.8.0, v3.12.0, v4.0.0 and v4.5.2: arguments/sft_args.py (_init_fsdp) and config/fsdp2.json for
what ``--fsdp`` stands for, cli/main.py for the ranks. Before v3.12 it has no ``--fsdp`` of its own; then, and under
`accelerate launch`, accelerate's configuration decides.
"""

from __future__ import annotations

import functools
import json

from fsdp_doctor.check.config_formats import flattened
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks import fsdp_section
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    ModelSettings,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, Plugin, keys
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.reading import followed
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen
from fsdp_doctor.errors import UsageError

_KEYS = fsdp_section.with_prefix((*fsdp_section.PLUGIN_KEYS, "activation_cpu_offload"))
# swift/config/fsdp2.json.
_PRESET = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
_OPTIONS = "ms_swift.fsdp"


def _recognises(settings: Settings) -> bool:
    program, script = settings.first(f"{LAUNCH}.program"), settings.first(f"{LAUNCH}.script")
    if program is None or program.value == "accelerate":
        return False
    return program.value in ("swift", "megatron") or (
        script is not None and ("swift/cli" in str(script.value) or str(script.value).startswith("swift.cli"))
    )


def _complete(settings: Settings) -> Settings:
    """``--fsdp`` written out: its words below ``ms_swift.fsdp``, and the section."""
    row = settings.first("fsdp")
    if row is None or not row.value:
        return settings
    text = str(row.value)
    if text == "fsdp2":
        inner = list(flattened(_PRESET, "fsdp2.json", lambda _: f"swift's fsdp2.json, {row}"))
    elif text.lstrip().startswith("{"):
        try:
            inner = list(flattened(json.loads(text), row.key, lambda _: row.where))
        except (ValueError, RecursionError):
            raise UsageError(f"{row}: this is not JSON") from None
    elif (found := followed(row)) is not None:
        inner = list(found)
    else:
        raise Unreadable(f"{row}: there is no such file; give it beside the command")
    found = Settings.joined(settings)
    for one in inner:
        found.put(Setting(_OPTIONS if one.key == "fsdp" else one.key, one.value, one.where))
    return found


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    read = functools.partial(_read, settings, given)
    return [ModelSettings(role="model", sections=(SECTION,), keys=_KEYS, read=read)]


def _read(settings: Settings, given: Given) -> ModelReading:
    program = settings.first(f"{LAUNCH}.program")
    if program is not None and program.value == "megatron":
        return not_under_fsdp("model", program)
    if settings.first("fsdp") is None:
        return not_under_fsdp("model", settings.first("deepspeed") or "--fsdp is not set")
    version = fsdp_section.fsdp_version(settings, default=2)
    options = settings.first(_OPTIONS)
    offloads = options is not None and "offload" in str(options.value).split()
    cpu = settings.first(*keys("cpu_offload"))
    tuner = settings.first("tuner_type", "train_type", "sft_type")
    plugin = Plugin(
        version=version,
        version_why=settings.first(*keys("version")) or "FSDP2 is ms-swift's default",
        offload=Chosen("policy" if offloads or settings.flag(*keys("cpu_offload")) else "none", cpu or options),
        backend=Chosen("device-only", "the Trainer makes its process group with NCCL alone"),
        sharding=Chosen("full"),
        model=Chosen("qwen3-lora" if tuner is None or "lora" in str(tuner.value) else "qwen3", tuner or "the default"),
        state_dict_type=fsdp_section.state_dict_type(settings, fsdp_section.DEFAULT_STATE_DICT_TYPE[version]),
        vllm=settings.flag("use_vllm"),
    )
    return ModelReading(
        uses=[fsdp_section.use_of_section(settings, plugin, "")],
        model=ConfiguredModel(path=settings.first("model"), ranks=given.world_size),
        findings=fsdp_section.version_conflicts(settings, {"": version}),
    )


MS_SWIFT = Framework(
    name="ms-swift",
    read_in="v3.12.0 to v4.5.2",
    distributions=("ms-swift",),
    recognises=_recognises,
    complete=_complete,
    models=_models,
)
