"""Frameworks that use accelerate's ``fsdp_config``: accelerate, Hugging Face's Trainer and TRL, axolotl, ms-swift.

Sources of the section in accelerate 1.15.0.dev: utils/dataclasses.py (FullyShardedDataParallelPlugin) for the settings
that each FSDP version ignores or refuses; Accelerator.get_state_dict and utils/fsdp_utils.py for the extractions. TRL's
sync to vLLM (``use_vllm``) was read in trl/generation/vllm_generation.py, and the sync of AsyncGRPO
(``weight_sync_steps``) in TRL's issues 6797 and 7103. The docstring of each framework's class names further sources.
"""

from __future__ import annotations

import dataclasses
import pathlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fsdp_doctor.check.config_files import flatten, parse_json
from fsdp_doctor.check.findings import ConfigFinding, ConfiguredModel, note, report_conflict
from fsdp_doctor.check.framework import (
    FsdpFramework,
    Keys,
    ModelReading,
    V,
    VersionRange,
    choose_backend,
    load_facts,
    report_not_under_fsdp,
)
from fsdp_doctor.check.launch_commands import PROGRAM, SCRIPT, SECTION as LAUNCH
from fsdp_doctor.check.reading import follow
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import (
    Chosen,
    ExtractionPoint,
    OffloadChoice,
    Role,
    make_extraction_point,
    make_loading_point,
)
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AxisName, Backend, Consumer, FsdpVersion, Model, Sharding, Strategy
from fsdp_doctor.matrix.cases import Scenario

_SECTION = "fsdp_config"
_VERSION_1_ONLY = (
    "sharding_strategy",
    "use_orig_params",
    "backward_prefetch",
    "forward_prefetch",
    "sync_module_states",
)
_VERSIONS: dict[str, FsdpVersion] = {"1": 1, "2": 2}
_CHECKPOINT: dict[tuple[int, str], str] = {
    (1, "FULL_STATE_DICT"): "full_state_dict.rank0+cpu",
    (1, "SHARDED_STATE_DICT"): "sharded_state_dict",
    (1, "LOCAL_STATE_DICT"): "local_state_dict",
    (2, "FULL_STATE_DICT"): "get_model_state_dict.full+cpu",
    (2, "SHARDED_STATE_DICT"): "get_model_state_dict.sharded+cpu",
}
# Methods of load_fsdp_model and load_fsdp_optimizer under FSDP2.
_RESUME: dict[tuple[int, str], tuple[str, ...]] = {
    (2, "FULL_STATE_DICT"): ("set_model_state_dict.broadcast", "set_optimizer_state_dict.broadcast"),
    (2, "SHARDED_STATE_DICT"): ("dcp.load.model+optimizer",),
}
# Names from torch.distributed.fsdp.ShardingStrategy; accelerate also accepts their numbers.
_FULL = ("FULL_SHARD", "SHARD_GRAD_OP", "1", "2")
_SHARDING: dict[str, Sharding] = {
    **dict.fromkeys(("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "4", "5"), Sharding.HSDP),
    **dict.fromkeys(("NO_SHARD", "3"), Sharding.SIZE1),
}


def _name_keys(name: str) -> Keys:
    """Returns the key of a setting in ``fsdp_config``, with accelerate's prefix ``fsdp_`` and without it."""
    return f"{_SECTION}.fsdp_{name}", f"{_SECTION}.{name}"


class FsdpConfigFramework(FsdpFramework[V]):
    """Configuration that becomes arguments of accelerate's FullyShardedDataParallelPlugin."""

    vllm_key = "use_vllm"

    @abstractmethod
    def read_fsdp_version(self, versions: V) -> FsdpVersion:
        """Returns the version of FSDP that these versions of the framework use."""

    def list_section_keys(self) -> Keys:
        words = self.facts.section_keys.split()
        return (*(f"fsdp_{word}" for word in words), *words)

    def read_state_dict_type(self, versions: V) -> str:
        """Reads the state dict type in capitals; empty means the plugin's default."""
        return self.settings.read_word(*_name_keys("state_dict_type")).upper()

    def list_extractions(self, role: Role, versions: V, scenario: Scenario) -> Iterator[ExtractionPoint]:
        """Lists the extractions and the loads.

        Extractions are in Accelerator.get_state_dict, save_fsdp_model and TRL's sync_weights; loads are in load_state.
        """
        version = scenario.version
        default = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
        saved = version, self.read_state_dict_type(versions) or default
        yield make_extraction_point("whole model (get_state_dict)", scenario, _CHECKPOINT[version, "FULL_STATE_DICT"])
        if saved in _CHECKPOINT:
            yield make_extraction_point("checkpoint (save_state)", scenario, _CHECKPOINT[saved])
        if self.settings.read_flag(self.vllm_key):
            sync = "summon_full_params" if version == 1 else "state_dict.to.full_tensor"
            yield make_extraction_point("weights for vLLM (TRL)", scenario, sync)
        if version == 2 and self.settings.find_first("weight_sync_steps"):
            failing = scenario.change(consumer=Consumer.DIES)
            yield make_extraction_point("weights for vLLM that fails (AsyncGRPO)", failing, "state_dict.full_tensor.to")
        for method in _RESUME.get(saved, ()):
            yield make_loading_point("resume (load_state)", scenario, method)

    def choose_strategy(self, version: FsdpVersion, why: Setting | str) -> Chosen:
        if version == 2:
            return Chosen(Strategy.FSDP2, why)
        orig = self.settings.find_first(*_name_keys("use_orig_params"))
        is_flat = not self.settings.read_flag(*_name_keys("use_orig_params"), default=True)
        return Chosen(
            Strategy.FSDP1 if is_flat else Strategy.FSDP1_ORIG,
            f"{why}; {orig or 'use_orig_params=true is the default'}",
        )

    def read_configured_version(self, *, default: FsdpVersion, before: Keys = ()) -> FsdpVersion:
        """Reads the FSDP version from the keys in ``before`` or, if none is set, from ``fsdp_config``.

        Returns ``default`` if no version is set. Raises UsageError for a version other than 1 and 2.
        """
        row = self.settings.find_first(*before, *_name_keys("version"))
        if row is None:
            return default
        if str(row.value) not in _VERSIONS:
            raise UsageError(f"{row}: the version of FSDP in fsdp_config must be 1 or 2")
        return _VERSIONS[str(row.value)]

    def make_model_of_all_ranks(self, role: Role) -> ConfiguredModel:
        return ConfiguredModel(path=self.settings.find_first(*self.list_keys(role).path), ranks=self.world_size)

    def find_version_conflicts(self, fsdp_versions: Mapping[str, FsdpVersion]) -> list[ConfigFinding]:
        """Finds keys that belong to the other version of FSDP, with the framework versions to which this applies.

        ``fsdp_versions`` maps labels of framework versions to FSDP versions; the label is empty if all behave the same.
        """
        return [
            dataclasses.replace(
                finding,
                holds_for=tuple(
                    f"model, {label}" for label, same in fsdp_versions.items() if same == version and label
                ),
            )
            for version in dict.fromkeys(fsdp_versions.values())
            for finding in self._find_keys_of_other_version(version)
        ]

    def _find_keys_of_other_version(self, version: FsdpVersion) -> Iterator[ConfigFinding]:
        """Finds keys that belong to the other FSDP version, and values that accelerate refuses with this version."""
        reshard = self.settings.find_first(*_name_keys("reshard_after_forward"))
        if version == 1:
            if reshard and isinstance(reshard.value, bool):
                sentence = "reshard_after_forward belongs to fsdp_version 2; use sharding_strategy with version 1"
                yield report_conflict(sentence, reshard)
            return
        if rows := [row for name in _VERSION_1_ONLY if (row := self.settings.find_first(*_name_keys(name)))]:
            yield report_conflict("fsdp_version 2 does not read these settings, which belong to version 1", *rows)
        local = self.settings.find_first(*_name_keys("state_dict_type"))
        if local and str(local.value).upper() == "LOCAL_STATE_DICT":
            yield report_conflict("accelerate rejects LOCAL_STATE_DICT with fsdp_version 2", local)
        if reshard and str(reshard.value).lower() not in ("true", "false"):
            yield report_conflict("reshard_after_forward must be true or false with fsdp_version 2", reshard)


def _read_sharding(row: Setting) -> Chosen:
    """Reads FSDP1's sharding strategy. Raises Unreadable for a strategy that torch does not have."""
    word = str(row.value).upper()
    if word in _FULL:
        return Chosen(Sharding.FULL)
    if word not in _SHARDING:
        raise Unreadable(f"{row} is not a sharding strategy of FSDP1")
    return Chosen(_SHARDING[word], row)


# accelerate

_REPLICAS = "parallelism_config.parallelism_config_dp_replicate_size"
_CONFIG_FILE = f"{LAUNCH}.config_file"
# Flags of `accelerate launch` that choose an engine, and the distributed_type that each stands for.
_ENGINES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "NO", "XLA", "TPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU")


class _AccelerateVersions(VersionRange, frozen=True, kw_only=True):
    """Range of accelerate versions; ``offload_backend`` is the process group's backend under ``offload_params``."""

    offload_backend: Backend


class Accelerate(FsdpConfigFramework[_AccelerateVersions]):
    """``fsdp_config`` in accelerate's YAML, versions 1 and 2, and the flags of ``accelerate launch``.

    Sources read in 1.6.0, 1.9.0 and 1.15.0.dev: commands/launch.py and utils/launch.py for the defaults and for the
    precedence of flags and files; state.py for the backend, which has gloo as well as NCCL since 1.7.0 (PR 3574).
    """

    facts = load_facts("accelerate", _AccelerateVersions)

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        has_section = any(row.key.startswith(f"{_SECTION}.fsdp_") for row in settings.list_below(_SECTION))
        is_asked = any(f"{LAUNCH}.{flag}" in settings for flag in (*_ENGINES, "config_file"))
        return (
            "distributed_type" in settings
            or "compute_environment" in settings
            or (settings.read_text(PROGRAM) == "accelerate" and ("fsdp" not in settings or is_asked))
            or (has_section and "fsdp" not in settings and "output_dir" not in settings)
        )

    @staticmethod
    def complete(settings: Settings) -> Settings:
        """Adds the settings in the file of ``--config_file``, and the launch flags, which take precedence over them."""
        completed = Settings.join(_read_config_file(settings), settings)
        for flag, engine in _ENGINES.items():
            if row := settings.find_first_true(f"{LAUNCH}.{flag}"):
                completed.put(Setting("distributed_type", engine, f"--{flag}, {row.where}"))
        for row in settings.list_below(LAUNCH):
            if row.name.startswith("fsdp_"):
                completed.put(Setting(f"{_SECTION}.{row.name}", row.value, row.where))
            elif row.name in ("num_processes", "num_machines"):
                completed.put(Setting(row.name, row.value, row.where))
        return completed

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        return settings.read_number("num_processes")

    def read(self, role: Role) -> ModelReading:
        launched = self.settings.find_first("distributed_type")
        if launched is not None and str(launched.value).upper() != "FSDP":
            if str(launched.value).upper() not in _OTHER_ENGINES:
                raise Unreadable(f"{launched} is not one of accelerate's engines")
            ignored = [row for row in self.settings.list_below(_SECTION) if row.value is not None][:1]
            sentence = "accelerate reads fsdp_config only with distributed_type=FSDP"
            return report_not_under_fsdp(role, launched, *(report_conflict(sentence, launched, row) for row in ignored))
        if launched is None and not self.settings.list_below(_SECTION):
            raise Unreadable("accelerate launch has neither --use_fsdp nor --config_file, so the default file decides")
        findings = [*self.find_version_conflicts({"": self.read_configured_version(default=1)}), *self._find_refused()]
        if (row := self.settings.find_first("fsdp")) and row.value:
            # TrainingArguments overrides the environment variables that ``accelerate launch`` sets.
            sentence = (
                "the script sets fsdp too, which overrides the settings of accelerate launch; leave one of them out"
            )
            findings.append(note(sentence, row))
        return self.read_role(role, findings)

    def read_fsdp_version(self, versions: _AccelerateVersions) -> FsdpVersion:
        return self.read_configured_version(default=1)

    def choose_axes(self, role: Role, versions: _AccelerateVersions) -> dict[AxisName, Chosen]:
        offload = OffloadChoice(
            policy=self.settings.find_first_true(*_name_keys("offload_params")),
            default=self.settings.find_first(*_name_keys("offload_params"))
            or "fsdp_offload_params=false is the default",
        )
        otherwise: Backend = (
            Backend.MIXED if self.read_state_dict_type(versions) == "FULL_STATE_DICT" else Backend.DEVICE_ONLY
        )
        why = self.settings.find_first(*_name_keys("version")) or "fsdp_version=1 is the default"
        return {
            "strategy": self.choose_strategy(self.read_fsdp_version(versions), why),
            "offload": offload.chosen,
            "backend": Chosen(
                versions.offload_backend if offload.policy else otherwise,
                "accelerate/state.py: gloo in addition to NCCL for offload_params since 1.7.0, and for FULL_STATE_DICT",
            ),
            "sharding": self.choose_sharding(role),
            "model": Chosen(Model.QWEN3),
        }

    def choose_sharding(self, role: Role) -> Chosen:
        if (self.settings.read_number(_REPLICAS) or 1) > 1:
            return Chosen(Sharding.HSDP, self.settings.find_first(_REPLICAS))
        row = self.settings.find_first(*_name_keys("sharding_strategy"))
        if row is None or self.read_configured_version(default=1) == 2:
            return Chosen(Sharding.FULL)
        return _read_sharding(row)

    def read_model(self, role: Role) -> ConfiguredModel:
        model = self.make_model_of_all_ranks(role)
        if model.ranks is None:
            return model
        machines = self.settings.read_number("num_machines", default=1) or 1
        match self.choose_sharding(role).value:
            case Sharding.SIZE1:
                return dataclasses.replace(model, ranks=1)
            case Sharding.HSDP:
                return dataclasses.replace(model, ranks=max(1, model.ranks // machines))
            case _:
                return model

    def _find_refused(self) -> Iterator[ConfigFinding]:
        """Finds settings in a file that make ``accelerate launch`` refuse to start; flags are never refused."""
        engine = self.settings.find_first("distributed_type")
        for row in self.settings:
            is_misplaced = row.key.startswith("fsdp_") and "." not in row.key and _is_in_file(row)
            if engine is not None and row.file == engine.file and is_misplaced:
                yield report_conflict(
                    f"accelerate refuses a file with an unknown key; move {row.key} into fsdp_config", row
                )
        synchronizes = self.settings.find_first(*_name_keys("sync_module_states"))
        loads = self.settings.find_first(*_name_keys("cpu_ram_efficient_loading"))
        if synchronizes is None or synchronizes.value is not False or not _is_in_file(synchronizes):
            return
        if loads is None or loads.value is not False:
            sentence = (
                "accelerate launch refuses cpu_ram_efficient_loading, which is on by default, without "
                "sync_module_states"
            )
            yield report_conflict(sentence, loads, synchronizes)


def _read_config_file(settings: Settings) -> Settings:
    """Returns the settings in the file that ``--config_file`` names; empty if the file is also an argument of check.

    Raises Unreadable if the file does not exist on this machine, unless a flag chooses the engine.
    """
    row = settings.find_first(_CONFIG_FILE)
    if row is None or "distributed_type" in settings:
        return Settings()
    read = follow(row)
    if read is None and not any(f"{LAUNCH}.{flag}" in settings for flag in _ENGINES):
        raise Unreadable(f"{row}: there is no file at this path; give the file's location as another argument")
    return read or Settings()


def _is_in_file(row: Setting) -> bool:
    return pathlib.Path(row.file).suffix.lower() in (".yaml", ".yml", ".json")


# Hugging Face's Trainer and TRL

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
# Trainer keys that no other framework's configuration has together with fsdp_config.
_TRAINER_KEYS = ("output_dir", "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")


class _TrainerVersions(VersionRange, frozen=True, kw_only=True):
    """Range of transformers versions.

    ``default`` is the FSDP version if the settings do not give a version. Each ``reads_*`` field says whether these
    versions read the key of the same name.
    """

    default: FsdpVersion
    reads_version: bool = True
    reads_cpu_offload: bool = False
    reads_state_dict_type: bool = False


class HfTrainer(FsdpConfigFramework[_TrainerVersions]):
    """``fsdp`` and ``fsdp_config`` of TrainingArguments, in JSON, YAML or flags.

    Sources read in transformers 4.46, 4.56, 5.0, 5.9, 5.10, 5.11 and 5.23: training_args.py (_process_fsdp_args; PR
    45640 made FSDP2 the default). In accelerate's state.py, the CPU backend depends on FSDP_OFFLOAD_PARAMS, which
    TrainingArguments sets only after the process group is created. Under torchrun the group therefore has only NCCL,
    unless ``ddp_backend`` says otherwise.
    """

    facts = load_facts("hf_trainer", _TrainerVersions)

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        has_section = _SECTION in settings or bool(settings.list_below(_SECTION))
        return "fsdp" in settings or (has_section and any(key in settings for key in _TRAINER_KEYS))

    @staticmethod
    def complete(settings: Settings) -> Settings:
        """Adds the settings of ``fsdp_config`` if it is a JSON text or names a JSON file.

        Raises UsageError if there is no such file, and Unreadable if the value contains a variable.
        """
        row = settings.find_first(_SECTION)
        if row is None or not isinstance(row.value, str) or not row.value:
            return settings
        if "$" in row.value:
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        rows = parse_json(row) if row.value.lstrip().startswith("{") else follow(row)
        if rows is None:
            raise UsageError(
                f"{row}: there is no file at this path; give the file's location as another argument, or write the "
                "settings into fsdp_config"
            )
        return Settings.join(settings, [Setting(f"{_SECTION}.{r.key}", r.value, r.where) for r in rows])

    def list_models(self) -> dict[Role, tuple[str, ...]]:
        return {"model": (_SECTION,) if self._read_options() else ()}

    def read(self, role: Role) -> ModelReading:
        options, ranges = self._read_options(), self.list_ranges()
        if not options:
            sentence = "TrainingArguments reads fsdp_config only if fsdp is set"
            ignored = [report_conflict(sentence, row) for row in self.settings.list_below(_SECTION)[:1]]
            return report_not_under_fsdp(role, self.settings.find_first("deepspeed") or "fsdp is not set", *ignored)
        fsdp_versions = {versions.label: self.read_fsdp_version(versions) for versions in ranges}
        findings = [*self.find_version_conflicts(fsdp_versions), *self._find_ignored(options, ranges)]
        return self.read_role(role, findings)

    def read_model(self, role: Role) -> ConfiguredModel:
        return self.make_model_of_all_ranks(role)

    def read_fsdp_version(self, versions: _TrainerVersions) -> FsdpVersion:
        asked = self.read_configured_version(default=versions.default)
        return asked if versions.reads_version else versions.default

    def read_state_dict_type(self, versions: _TrainerVersions) -> str:
        if not versions.reads_state_dict_type:
            return ""
        return self.settings.read_word(*_name_keys("state_dict_type"), default="FULL_STATE_DICT").upper()

    def choose_axes(self, role: Role, versions: _TrainerVersions) -> dict[AxisName, Chosen]:
        options, version = self._read_options(), self.read_fsdp_version(versions)
        fsdp = self.settings.find_first("fsdp")
        policy = fsdp if "offload" in options else None
        if versions.reads_cpu_offload:
            policy = self.settings.find_first_true(*_name_keys("cpu_offload")) or policy
        words = [word.upper() for word in options if version == 1 and word.upper() in _SHARDING]
        row = self.settings.find_first(*_name_keys("version")) if versions.reads_version else None
        return {
            "strategy": self.choose_strategy(version, row or f"FSDP{versions.default} is the default"),
            "offload": OffloadChoice(policy=policy, default=f"{fsdp} does not ask for offload").chosen,
            "backend": choose_backend(
                self.settings.find_first("ddp_backend"),
                "only NCCL under torchrun; accelerate launch sets its own backend",
            ),
            "sharding": Chosen(_SHARDING[words[0]], fsdp) if words else Chosen(Sharding.FULL),
            "model": Chosen(Model.QWEN3),
        }

    def _read_options(self) -> tuple[str, ...]:
        """Reads the words of ``fsdp``.

        Raises UsageError for a word that TrainingArguments does not have, and Unreadable for a value with a variable.
        """
        row = self.settings.find_first("fsdp")
        if row is None or row.value is False:
            return ()
        if row.value is True:
            return ("full_shard",)
        if "$" in str(row.value):
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        words = row.value if isinstance(row.value, list) else str(row.value).split()
        for word in words:
            if word not in _OPTIONS:
                raise UsageError(f"{row}: {word!r} is not an option of fsdp; the options are {', '.join(_OPTIONS)}")
        return tuple(words)

    def _find_ignored(self, options: Sequence[str], ranges: Sequence[_TrainerVersions]) -> Iterator[ConfigFinding]:
        """Finds settings that the relevant versions ignore or refuse.

        A finding that depends on the version is a note if the version is not known.
        """
        finding = report_conflict if len(ranges) == 1 else note
        version = self.settings.find_first(*_name_keys("version"))
        if version and any(not versions.reads_version for versions in ranges):
            yield finding("transformers before 5.0 ignores the version in fsdp_config and always uses FSDP1", version)
        offload = self.settings.find_first_true(*_name_keys("cpu_offload")) if "offload" not in options else None
        if offload and any(not versions.reads_cpu_offload for versions in ranges):
            yield finding(
                "transformers before 5.10 ignores cpu_offload; with these versions put `offload` into fsdp", offload
            )
        ignored = self.settings.find_first_true(*_name_keys("offload_params"))
        if ignored and "offload" not in options and not offload:
            yield report_conflict("offload_params is accelerate's name, which TrainingArguments does not read", ignored)
        refused = ", ".join(word for word in options if word.upper() in _SHARDING)
        if refused and any(versions.default == 2 and self.read_fsdp_version(versions) == 2 for versions in ranges):
            yield finding(f"transformers since 5.10 rejects {refused} with FSDP2", self.settings.find_first("fsdp"))
        deepspeed = self.settings.find_first("deepspeed", f"{LAUNCH}.deepspeed")
        if deepspeed and deepspeed.value:
            yield report_conflict(
                "fsdp and deepspeed are both set; TrainingArguments accepts only one of them", deepspeed
            )


# axolotl

# Keys that no other framework has together with base_model.
_AXOLOTL_KEYS = (
    *("datasets", "sequence_len", "micro_batch_size", "adapter", "special_tokens", "sample_packing", "rl", "plugins"),
    *("val_set_size", "dataset_prepared_path", "tokenizer_type", "model_type", "lora_r", "chat_template"),
)


class _AxolotlVersions(VersionRange, frozen=True, kw_only=True):
    """Range of versions.

    ``offload_backend`` is the process group's backend with offload. ``reads_version`` is true if fsdp_version is read.
    """

    offload_backend: Backend
    reads_version: bool = True


class Axolotl(FsdpConfigFramework[_AxolotlVersions]):
    """``fsdp``, ``fsdp_config`` and ``fsdp_version`` in axolotl's YAML.

    Sources read in v0.4.0 and v0.7.1 to v0.18.0: utils/schemas (fsdp.py, validation.py) for the keys and their older
    names; utils/trainer.py (setup_fsdp_envs) for the environment that accelerate reads; core/builders/base.py for the
    Trainer's arguments; requirements.txt for the accelerate version. Since v0.10 axolotl requires accelerate 1.7 or
    newer, whose backend is gloo as well as NCCL.
    """

    facts = load_facts("axolotl", _AxolotlVersions)
    vllm_key = "trl.use_vllm"

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return (
            ("base_model" in settings and any(key in settings for key in _AXOLOTL_KEYS))
            or settings.read_text(PROGRAM) == "axolotl"
            or settings.read_text(SCRIPT).startswith("axolotl.")
        )

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        """Counts the ranks that the command tells its launcher to start; None if the command does not give a number.

        accelerate gets the number of ranks on all nodes, torchrun the number on each node.
        """
        per_node = settings.count("nproc_per_node")
        return settings.read_number("num_processes") or (per_node and per_node * (settings.count("nnodes") or 1))

    def list_models(self) -> dict[Role, tuple[str, ...]]:
        is_set = self.settings.find_first("fsdp") is not None or self.settings.list_below(_SECTION)
        return {"model": (_SECTION,) if is_set else ()}

    def list_section_keys(self) -> Keys:
        return _add_words_of_accelerate(self.facts.section_keys)

    def read(self, role: Role) -> ModelReading:
        if "base_model" not in self.settings:
            raise Unreadable("the configuration file of the axolotl command was not given; give it as another argument")
        if not self._read_options() and not self.settings.list_below(_SECTION):
            return report_not_under_fsdp(
                role, self.settings.find_first("deepspeed") or "neither fsdp nor fsdp_config is set"
            )
        fsdp_versions = {versions.label: self.read_fsdp_version(versions) for versions in self.list_ranges()}
        return self.read_role(role, self.find_version_conflicts(fsdp_versions))

    def read_model(self, role: Role) -> ConfiguredModel:
        return self.make_model_of_all_ranks(role)

    def list_ranges(self) -> Sequence[_AxolotlVersions]:
        """Lists the ranges that contain the version; all ranges if no version is given.

        If no version is given but fsdp_version is set, versions before v0.9 are left out, since they do not read this
        setting.
        """
        is_newer = self.version is None and "fsdp_version" in self.settings
        return [versions for versions in super().list_ranges() if versions.reads_version or not is_newer]

    def read_fsdp_version(self, versions: _AxolotlVersions) -> FsdpVersion:
        return self.read_configured_version(default=1, before=("fsdp_version",)) if versions.reads_version else 1

    def choose_axes(self, role: Role, versions: _AxolotlVersions) -> dict[AxisName, Chosen]:
        by_option = self.settings.find_first("fsdp") if "offload" in self._read_options() else None
        offload = OffloadChoice(
            policy=self.settings.find_first_true(*_name_keys("offload_params")) or by_option,
            default=self.settings.find_first(*_name_keys("offload_params")) or "offload_params=false is the default",
        )
        version, adapter = self.read_fsdp_version(versions), self.settings.find_first("adapter")
        why = self.settings.find_first("fsdp_version", *_name_keys("version")) or "fsdp_version=1 is the default"
        return {
            "strategy": self.choose_strategy(version, why),
            "offload": offload.chosen,
            "backend": Chosen(
                versions.offload_backend if offload.policy else Backend.DEVICE_ONLY,
                "since 1.7, which axolotl has since v0.10, accelerate makes gloo in addition to NCCL for the offload",
            ),
            "sharding": self._choose_sharding(version),
            "model": Chosen(
                Model.QWEN3_LORA if adapter and adapter.value in ("lora", "qlora") else Model.QWEN3, adapter
            ),
        }

    def _choose_sharding(self, version: FsdpVersion) -> Chosen:
        if version == 2:
            has_replicas = (self.settings.read_number("dp_replicate_size") or 1) > 1
            return (
                Chosen(Sharding.HSDP, self.settings.find_first("dp_replicate_size"))
                if has_replicas
                else Chosen(Sharding.FULL)
            )
        row = self.settings.find_first(*_name_keys("sharding_strategy"))
        if row is not None:
            return _read_sharding(row)
        sharding = next((_SHARDING[word.upper()] for word in self._read_options() if word.upper() in _SHARDING), None)
        return Chosen(sharding, self.settings.find_first("fsdp")) if sharding else Chosen(Sharding.FULL)

    def _read_options(self) -> list[str]:
        row = self.settings.find_first("fsdp")
        if row is None or row.value in (False, True):
            return []
        return [str(word) for word in row.value] if isinstance(row.value, list) else str(row.value).split()


# ms-swift

# Contents of swift/config/fsdp2.json.
_PRESET = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
_SWIFT_OPTIONS = "ms_swift.fsdp"


class MsSwift(FsdpConfigFramework[VersionRange]):
    """``--fsdp`` on ms-swift's command line: ``fsdp2``, a JSON text, or a JSON file.

    Sources read in v3.8.0, v3.12.0, v4.0.0 and v4.5.2: arguments/sft_args.py (_init_fsdp) and config/fsdp2.json for the
    meaning of ``--fsdp``; cli/main.py for the number of ranks. Before v3.12 ms-swift does not interpret ``--fsdp``. In
    these versions, and under `accelerate launch`, accelerate's configuration decides.
    """

    facts = load_facts("ms_swift")

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        program, script = settings.read_text(PROGRAM), settings.read_text(SCRIPT)
        if program in ("", "accelerate"):
            return False
        return program in ("swift", "megatron") or "swift/cli" in script or script.startswith("swift.cli")

    @staticmethod
    def complete(settings: Settings) -> Settings:
        """Adds the settings that ``--fsdp`` stands for: its words as ``ms_swift.fsdp``, and its ``fsdp_config``."""
        row = settings.find_first("fsdp")
        if row is None or not row.value:
            return settings
        completed = Settings.join(settings)
        for inner in _read_fsdp_flag(row):
            completed.put(Setting(_SWIFT_OPTIONS if inner.key == "fsdp" else inner.key, inner.value, inner.where))
        return completed

    def list_section_keys(self) -> Keys:
        return _add_words_of_accelerate(self.facts.section_keys)

    def read(self, role: Role) -> ModelReading:
        if self.settings.read_text(PROGRAM) == "megatron":
            return report_not_under_fsdp(role, self.settings.find_first(PROGRAM))
        if self.settings.find_first("fsdp") is None:
            return report_not_under_fsdp(role, self.settings.find_first("deepspeed") or "--fsdp is not set")
        return self.read_role(role, self.find_version_conflicts({"": self.read_configured_version(default=2)}))

    def read_model(self, role: Role) -> ConfiguredModel:
        return self.make_model_of_all_ranks(role)

    def read_fsdp_version(self, versions: VersionRange) -> FsdpVersion:
        return self.read_configured_version(default=2)

    def choose_axes(self, role: Role, versions: VersionRange) -> dict[AxisName, Chosen]:
        options, cpu = self.settings.find_first(_SWIFT_OPTIONS), self.settings.find_first(*_name_keys("cpu_offload"))
        by_option = options if "offload" in self.settings.read_text(_SWIFT_OPTIONS).split() else None
        offload = OffloadChoice(
            policy=self.settings.find_first_true(*_name_keys("cpu_offload")) or by_option, default=cpu or options
        )
        tuner = self.settings.find_first("tuner_type", "train_type", "sft_type")
        has_adapter = not tuner or str(tuner.value) in ("lora", "longlora", "adalora")
        why = self.settings.find_first(*_name_keys("version")) or "FSDP2 is ms-swift's default"
        return {
            "strategy": self.choose_strategy(self.read_fsdp_version(versions), why),
            "offload": offload.chosen,
            "backend": Chosen(Backend.DEVICE_ONLY, "the Trainer makes its process group with only NCCL"),
            "sharding": Chosen(Sharding.FULL),
            "model": Chosen(Model.QWEN3_LORA if has_adapter else Model.QWEN3, tuner or "the default"),
        }


def _add_words_of_accelerate(words: str) -> Keys:
    """Returns the keys of accelerate's section and the given words, each with the prefix ``fsdp_`` and without it."""
    every = f"{Accelerate.facts.section_keys} {words}".split()
    return (*(f"fsdp_{word}" for word in every), *every)


def _read_fsdp_flag(row: Setting) -> Iterable[Setting]:
    text = str(row.value)
    if text == "fsdp2":
        return flatten(_PRESET, "fsdp2.json", lambda _: f"swift's fsdp2.json, {row}")
    if text.lstrip().startswith("{"):
        return parse_json(row)
    if (named := follow(row)) is not None:
        return named
    raise Unreadable(f"{row}: there is no file at this path; give the file's location as another argument")
