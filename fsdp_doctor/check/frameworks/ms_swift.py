"""ms-swift: ``--fsdp`` of its command line: ``fsdp2``, a JSON text, or a JSON file.

Read in ms-swift at v3.8.0, v3.12.0, v4.0.0 and v4.5.2: arguments/sft_args.py (_init_fsdp) and config/fsdp2.json for
what ``--fsdp`` stands for, cli/main.py for the ranks. Before v3.12 it has no ``--fsdp`` of its own; then, and under
`accelerate launch`, accelerate's configuration decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_doctor.check.config_files import flatten, parse_json
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks import fsdp_section
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    get_if_true,
    load_known_keys,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, Plugin, keys
from fsdp_doctor.check.launch_commands import PROGRAM, SCRIPT
from fsdp_doctor.check.reading import follow
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, OffloadChoice, Role

# swift/config/fsdp2.json.
_PRESET = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
_OPTIONS = "ms_swift.fsdp"
_LORA = ("lora", "longlora", "adalora")


class MsSwift(Framework):
    name = "ms-swift"
    read_in = "v3.12.0 to v4.5.2"
    distributions = ("ms-swift",)
    keys = fsdp_section.with_prefix((*load_known_keys("plugin"), "activation_cpu_offload"))

    def recognizes(self, settings: Settings) -> bool:
        program, script = settings.text(PROGRAM), settings.text(SCRIPT)
        if program in ("", "accelerate"):
            return False
        return program in ("swift", "megatron") or "swift/cli" in script or script.startswith("swift.cli")

    def complete(self, settings: Settings) -> Settings:
        """The words that ``--fsdp`` stands for, below ``ms_swift.fsdp``, and its section."""
        row = settings.first("fsdp")
        if row is None or not row.value:
            return settings
        completed = Settings.joined(settings)
        for inner in _read_fsdp_flag(row):
            completed.put(Setting(_OPTIONS if inner.key == "fsdp" else inner.key, inner.value, inner.where))
        return completed

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"model": (SECTION,)}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        if settings.text(PROGRAM) == "megatron":
            return not_under_fsdp(role, settings.first(PROGRAM))
        if settings.first("fsdp") is None:
            return not_under_fsdp(role, settings.first("deepspeed") or "--fsdp is not set")
        version = fsdp_section.fsdp_version(settings, default=2)
        options, cpu = settings.first(_OPTIONS), settings.first(*keys("cpu_offload"))
        by_option = options if "offload" in settings.text(_OPTIONS).split() else None
        tuner = settings.first("tuner_type", "train_type", "sft_type")
        plugin = Plugin(
            version=version,
            version_why=settings.first(*keys("version")) or "FSDP2 is ms-swift's default",
            offload=OffloadChoice(
                policy=get_if_true(settings, *keys("cpu_offload")) or by_option, default=cpu or options
            ),
            backend=Chosen("device-only", "the Trainer makes its process group with NCCL alone"),
            model=Chosen("qwen3-lora" if not tuner or str(tuner.value) in _LORA else "qwen3", tuner or "the default"),
            state_dict_type=fsdp_section.state_dict_type(settings),
            vllm=settings.flag("use_vllm"),
        )
        return ModelReading(
            uses=[fsdp_section.use_of_section(settings, plugin, "")],
            model=ConfiguredModel(path=settings.first("model"), ranks=given.world_size),
            findings=fsdp_section.find_version_conflicts(settings, {"": version}),
        )


def _read_fsdp_flag(row: Setting) -> Iterable[Setting]:
    text = str(row.value)
    if text == "fsdp2":
        return flatten(_PRESET, "fsdp2.json", lambda _: f"swift's fsdp2.json, {row}")
    if text.lstrip().startswith("{"):
        return parse_json(row)
    if (named := follow(row)) is not None:
        return named
    raise Unreadable(f"{row}: there is no such file; give it beside the command")
