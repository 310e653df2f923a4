"""The table of fixes, and the type of its entries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.clues import ClueName


@dataclass(frozen=True, kw_only=True)
class FrameworkFix:
    """A replacement for one function of a framework.

    id: the name of the fix for the user.
    framework: the name of the framework for the user.
    distribution: the package whose installed version decides.
    target: the replaced function, as ``module:qualified.name``.
    versions: the releases of the distribution, as a version specifier of pip.
    sources: maps the sha256 of each known source of the function to the releases with this source. A source runs from
        the first decorator to the end of the function.
    mends: the short codes of the known failures that the fix prevents; empty if jobs without this function show the
        failure, too.
    cures: ids of cases that are ok with the fix and not ok without it, in a release of the range.
    promises: a text for the user about the results of the replacement.
    leaves: a text for the user about the cases that the replacement passes to the original.
    replacement: the replacing function, as ``module:name``.
    on_every_rank: whether every rank of a job calls the function.
    places: texts, one of which a traceback of the failure contains; if empty, the function's name.
    clue: the fact about a run that must be known, for a function that no traceback shows; else None.

    The replacement is called with the original, followed by the original's arguments. For a case that it does not
    cover, it calls the original through :func:`fsdp_doctor.fixes.applying.fall_back`.
    """

    id: str
    framework: str
    distribution: str
    target: str
    versions: str
    sources: dict[str, str]
    mends: tuple[str, ...]
    cures: tuple[str, ...]
    promises: str
    leaves: str
    replacement: str
    on_every_rank: bool = True
    places: tuple[str, ...] = ()
    clue: ClueName | None = None

    @property
    def module(self) -> str:
        """The module that defines the function."""
        return self.target.partition(":")[0]

    @property
    def function(self) -> str:
        """The name of the function without its class."""
        return self.target.partition(":")[2].rpartition(".")[2]


# Frameworks that others are built on, and by the distribution of another those whose functions it calls.
LIBRARIES = ("accelerate", "peft", "transformers")
_USES = {"transformers": ("accelerate", "peft"), "accelerate": ("peft",)} | dict.fromkeys(
    ("trl", "axolotl", "ms-swift"), ("accelerate", "peft", "transformers")
)
_VERL_LEAVES = (
    "the base under an adapter (base_sync_done=False), quantization-aware training, adapters of other kinds than LoRA"
)
_TRANSFORMERS_PROMISES = (
    "after from_pretrained with fsdp_cpu_offload the shards are on the CPU, and other tensors stay where "
    "they were put; during the load the shards are on the device, as without the fix"
)
_TRANSFORMERS_LEAVES = "models that are not offloaded"
FIXES: tuple[FrameworkFix, ...] = (
    FrameworkFix(
        id="verl-sender",
        framework="verl",
        distribution="verl",
        target="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",
        versions=">=0.7.1,<0.9",
        sources={
            "b715dc4c164e8e36de61b8fe1f26e461fa68cf02a9e43b5a0be6512e1ff43daa": "0.7.1",
            "e1be5ec2c0a092c1d7de3d81d0ed0a082155b9924c16fa820cc887ee8677db23": "0.8.0",
        },
        mends=("FD001", "FD090", "FD092", "FD093"),
        cures=(
            "verl:fsdp2/policy/get_per_tensor_param",
            "verl:fsdp2/none/merge/lora/get_per_tensor_param.merged",
        ),
        promises="the weights under the names of the Hub, parameters in bfloat16 as verl sends them; with merge: true "
        "the adapters are in them; an adapter that is sent by itself is on the CPU, in its own dtype; "
        "each bucket has half the size of the largest tensor; casting or merging offloaded weights takes 24 MiB more",
        leaves=_VERL_LEAVES,
        replacement="fsdp_doctor.fixes.on_verl:send_in_bfloat16",
    ),
    FrameworkFix(
        id="verl-sender",
        framework="verl",
        distribution="verl",
        target="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",
        versions=">=0.9,<0.10",
        sources={"30802c73cfcc5ba2d16c8e1936713bdb47cdc12d78abe0884d7e4f2ff293e8c3": "0.9.0 and 0.9.1"},
        mends=("FD093", "FD234"),
        cures=("verl:fsdp/param+optimizer/lora/get_per_tensor_param.adapter",),
        promises="the weights under the names of the Hub, as verl sends them: in their own dtype or, with merge: true, "
        "in bfloat16 and with the adapters merged; an adapter that is sent by itself is on the CPU, in its own dtype; "
        "each bucket has half the size of the largest tensor; casting or merging offloaded weights takes 24 MiB more",
        leaves=_VERL_LEAVES,
        replacement="fsdp_doctor.fixes.on_verl:send_in_own_dtype",
    ),
    FrameworkFix(
        id="verl-checkpoint",
        framework="verl",
        distribution="verl",
        target="verl.utils.fsdp_utils:load_fsdp2_model_to_gpu",
        versions=">=0.7.1,<0.9",
        sources={"6328f7d34fa21774dba2918349340b6ac1c6c610a8026a76c8fa29078b9eb048": "0.7.1 and 0.8.0"},
        mends=("FD001",),
        cures=(
            "verl:fsdp2/policy/load_checkpoint",
            "verl:fsdp2/policy/load_checkpoint.fresh",
            "verl:fsdp2/policy/save_checkpoint.hf_model",
        ),
        promises="shards under CPUOffloadPolicy stay on the CPU when a checkpoint is saved or loaded, and the rest is "
        "moved to the device",
        leaves="models of which some units are not offloaded",
        replacement="fsdp_doctor.fixes.on_verl:leave_shards_to_policy",
        places=("fsdp_checkpoint_manager.py",),
    ),
    FrameworkFix(
        id="verl-offload",
        framework="verl",
        distribution="verl",
        target="verl.utils.fsdp_utils:offload_fsdp2_model_to_cpu",
        versions=">=0.9.1,<0.10",
        sources={"870def2ea72f5c893a77edb5b347abc5be5862a2d2440006c84f57acf749c710": "0.9.1"},
        mends=("FD030",),
        cures=("verl:fsdp2/param+optimizer/uneven/initialize",),
        promises="a model with uneven shards is offloaded by a copy that blocks",
        leaves="models whose shards are even",
        replacement="fsdp_doctor.fixes.moving:offload_uneven_shards",
    ),
    FrameworkFix(
        id="skyrl-offload",
        framework="skyrl",
        distribution="skyrl",
        target="skyrl.backends.skyrl_train.distributed.fsdp_utils:offload_fsdp2_model_to_cpu",
        versions=">=0.3,<0.4",
        sources={"c5a81f7d40e412b2de08e14c7a3d16121bb37ede69291fd611d62950b4d81c74": "0.3.0"},
        mends=("FD030",),
        cures=("skyrl:manual/uneven/extract_weights", "skyrl:manual/uneven/save_hf_model"),
        promises="a model with uneven shards is offloaded by a copy that blocks",
        leaves="models whose shards are even",
        replacement="fsdp_doctor.fixes.moving:offload_uneven_shards",
    ),
    FrameworkFix(
        id="skyrl-adapter",
        framework="skyrl",
        distribution="skyrl",
        target="skyrl.backends.skyrl_train.distributed.fsdp_utils:layered_summon_lora_params",
        versions=">=0.3,<0.4",
        sources={"358aa6209ebf5383ca197264f793be205ddfd3b504fbafb87e47709e072e6e90": "0.3.0"},
        mends=("FD210",),
        cures=("skyrl:none/lora/layered_summon_lora_params",),
        promises="the whole adapter on the CPU, in its own dtype, under the names that collect_lora_params gives",
        leaves="adapters of other kinds than LoRA",
        replacement="fsdp_doctor.fixes.on_skyrl:collect_adapter",
    ),
    FrameworkFix(
        id="skyrl-tied",
        framework="skyrl",
        distribution="skyrl",
        target="skyrl.backends.skyrl_train.distributed.fsdp_utils:apply_fsdp2",
        versions=">=0.3,<0.4",
        sources={"bb8256f9a0783af47244ba7f033aa5eda12f0678d81c61686f108dd64bfccb4c": "0.3.0"},
        mends=("FD211",),
        cures=("skyrl:none/tied/prepare",),
        promises="weights that the configuration ties are one parameter in FSDP2, too",
        leaves="models without tied weights",
        replacement="fsdp_doctor.fixes.on_skyrl:tie_before_sharding",
    ),
    FrameworkFix(
        id="trl-sender",
        framework="trl",
        distribution="trl",
        target="trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        versions=">=1.11,<1.17",
        sources={"baab615d5c7bc3e126cec1430f29213c984b275285b08a269cbfbf0adc2617b8": "1.11.0 to 1.16.0"},
        mends=("FD206", "FD207", "FD208"),
        cures=(
            "trl:fsdp1/none/sync_weights.colocate",
            "trl:fsdp1-orig/none/lora/sync_weights.merged",
            "trl:fsdp2/none/lora/sync_weights.merged",
        ),
        promises="each parameter once under the name that vLLM expects, in its own dtype, with the adapters in it and "
        "the model unchanged; each bucket has half the size of the largest tensor",
        leaves="models that are not under FSDP, adapters of other kinds than LoRA",
        replacement="fsdp_doctor.fixes.on_trl:iterate_full_tensors",
    ),
    FrameworkFix(
        id="peft-fsdp1-adapter",
        framework="peft",
        distribution="peft",
        target="peft.utils.save_and_load:get_peft_model_state_dict",
        versions=">=0.21,<0.22",
        sources={
            "49ec9b2a2cecf5d83eba0f707381684853433c216cc134b7e64fb0c20fd4475f": "0.21.0",
            "2679486415b7f4ef1677bf9be0a5e355468e2a848935edd9e17f998e772d413d": "0.21.1 and 0.21.2",
        },
        mends=("FD093", "FD200"),
        cures=("trainer:fsdp1/none/full/lora/save_model.adapter",),
        promises=(
            "the adapter's tensors in the state dict, under the names of a model that FSDP1 does not wrap; if a "
            "state dict is given, nothing is gathered"
        ),
        leaves="models that FSDP1 does not shard",
        replacement="fsdp_doctor.fixes.on_peft:take_adapter_within_fsdp1",
        on_every_rank=False,
    ),
    FrameworkFix(
        id="accelerate-full-load",
        framework="accelerate",
        distribution="accelerate",
        target="accelerate.utils.fsdp_utils:_set_model_state_dict",
        versions=">=1.13,<1.16",
        sources={
            "9fa75ec642cee4beee2fc81b33e491a532ca6e1c532152fe18b3a9fcea4a2f30": "1.13.0 and 1.14.0",
            "75577429ea9081d8b5b13b7cd727ac874768b09259e3fe28c799805c2e35e1f0": "1.15.0",
        },
        mends=("FD009", "FD200"),
        cures=("accelerate:fsdp2/offload/full/buffers/load_state",),
        promises=(
            "under FULL_STATE_DICT: with FSDP2 the whole model, each tensor on its own device, in its own dtype; "
            "with FSDP1 only the adapter under peft's names, on every rank, and an error if the file has no "
            "tensor of the adapter"
        ),
        leaves="SHARDED_STATE_DICT, the whole model under FSDP1, a load of only an adapter under FSDP2",
        replacement="fsdp_doctor.fixes.on_accelerate:load_full_state",
    ),
    FrameworkFix(
        id="accelerate-fsdp1-optimizer",
        framework="accelerate",
        distribution="accelerate",
        target="accelerate.utils.fsdp_utils:load_fsdp_optimizer",
        versions=">=1.13,<1.16",
        sources={
            "cccfdd7961f2d2d7fb4d99fb09b13ed1c6938774001b854fd85d69fbc735fd45": "1.13.0 and 1.14.0",
            "686245893cc02f59bc471d8993c3352697dafc7f3e96c5aa6df9951b7cb7a202": "1.15.0",
        },
        mends=("FD197",),
        cures=(
            "accelerate:fsdp1/none/sharded/load_state.fresh",
            "accelerate:fsdp1-orig/offload/sharded/load_state.fresh",
        ),
        promises=(
            "the checkpoint's state in an optimizer that has no state: the optimizer gets empty state in the "
            "checkpoint's dtypes, without a step, and the original function fills it"
        ),
        leaves="FSDP2, FULL_STATE_DICT, use_dcp=False",
        replacement="fsdp_doctor.fixes.on_accelerate:load_sharded_optimizer",
    ),
    FrameworkFix(
        id="lightning-offload",
        framework="lightning",
        distribution="lightning",
        target="lightning.pytorch.strategies.model_parallel:ModelParallelStrategy.model_to_device",
        versions=">=2.6.5,<2.7",
        sources={"cc270f14f46be44774ee1ef387835612894743ae938687f85a34ae4383335866": "2.6.5 and 2.6.6"},
        mends=("FD006",),
        cures=("lightning:model-parallel/cpu_offload/full/fit", "lightning:model-parallel/cpu_offload/sharded/fit"),
        promises="shards under CPUOffloadPolicy stay on the CPU, and all other tensors are moved to the device",
        leaves="models with units that are not offloaded, shards that were on the meta device",
        replacement="fsdp_doctor.fixes.on_lightning:keep_offloaded_shards",
        places=("lightning/pytorch",),
    ),
    FrameworkFix(
        id="lightning-consolidation",
        framework="lightning",
        distribution="lightning",
        target="lightning.fabric.utilities.load:_load_distributed_checkpoint",
        versions=">=2.6.5,<2.7",
        sources={"14b5249ee8864fc85ab105d6d591eff0a3bcba49486008f6aab6c5014e64b64f": "2.6.5 and 2.6.6"},
        mends=("FD183",),
        cures=("lightning:model-parallel/none/sharded/consolidate_checkpoint",),
        promises="consolidate_checkpoint finds the weights of ModelParallelStrategy, and writes them under state_dict",
        leaves="other programs, such as Fabric's consolidation",
        replacement="fsdp_doctor.fixes.on_lightning:name_weights_as_expected",
        on_every_rank=False,
        places=("_format_checkpoint",),
    ),
    FrameworkFix(
        id="trainer-offload-params",
        framework="transformers",
        distribution="transformers",
        target="transformers.training_args:TrainingArguments._process_fsdp_args",
        versions=">=5.22,<5.25",
        sources={
            "90959cea749b4625caa90a2b58c23449ff497c5db4d57ee98124562a079db955": "5.22.0",
            "4600ff0a918ee6ac4e80f56cc694641f86fa3df3ebd23f385e96628142ce77bb": "5.23.0 and 5.24.0",
        },
        mends=("FD201",),
        cures=("trainer:fsdp1/offload_params/full/prepare",),
        promises="offload_params in fsdp_config offloads as cpu_offload does, unless cpu_offload is also set",
        leaves="FSDP2 with gradient clipping, if the process group has no backend for the CPU",
        replacement="fsdp_doctor.fixes.on_transformers:offload_as_accelerate_names_it",
    ),
    FrameworkFix(
        id="transformers-offload",
        framework="transformers",
        distribution="transformers",
        target="transformers.modeling_utils:PreTrainedModel._finalize_model_loading",
        versions=">=5.22,<5.25",
        sources={"6497a08c2632b857a4a14c3af75bc990cd189022e33203a6bbc20311b7838948": "5.22.0 to 5.24.0"},
        mends=("FD006",),
        cures=("transformers:fsdp_cpu_offload/from_pretrained",),
        promises=_TRANSFORMERS_PROMISES,
        leaves=_TRANSFORMERS_LEAVES,
        replacement="fsdp_doctor.fixes.on_transformers:offload_what_was_loaded",
        clue="sharding by transformers",
    ),
    FrameworkFix(
        id="transformers-offload-distributed",
        framework="transformers",
        distribution="transformers",
        target="transformers.distributed.mixin:DistributedMixin._load_and_finalize_distributed_pretrained_model",
        versions=">=5.22,<5.25",
        sources={"cda2cf474cefe61c267b303df18144ee5482b12abe7f5b75f49de59b8fa9c0cd": "5.22.0 to 5.24.0"},
        mends=("FD006",),
        cures=("transformers:fsdp_cpu_offload/distributed_checkpoint",),
        promises=_TRANSFORMERS_PROMISES,
        leaves=_TRANSFORMERS_LEAVES,
        replacement="fsdp_doctor.fixes.on_transformers:offload_what_was_loaded",
        clue="sharding by transformers",
    ),
    FrameworkFix(
        id="transformers-offload-backend",
        framework="transformers",
        distribution="transformers",
        target="transformers.distributed.utils:initialize_distributed_mesh",
        versions=">=5.22,<5.25",
        sources={
            "7f71683706c089cfd90155f6c14f814df817fbb95c3a18361a82e3d575b867a1": "5.22.0",
            "9baea3f08d53c0d74ce97f8cd1a43361838fcfe9f2bc716cf7e9abdb942696a3": "5.23.0 and 5.24.0",
        },
        mends=("FD015",),
        cures=("transformers:fsdp_cpu_offload/from_pretrained",),
        promises="with fsdp_cpu_offload the process group that transformers makes also has gloo for the CPU",
        leaves="models that are not offloaded, process groups that the job has made",
        replacement="fsdp_doctor.fixes.on_transformers:begin_with_backend_for_cpu",
        clue="sharding by transformers",
    ),
)
# The packages whose versions decide which fixes there are.
DISTRIBUTIONS = tuple(dict.fromkeys(fix.distribution for fix in FIXES))


def list_fixes(framework: str) -> list[FrameworkFix]:
    """Returns the fixes for a framework. Raises UsageError if there are none."""
    found = [fix for fix in FIXES if fix.framework == framework]
    if not found:
        known = ", ".join(sorted({fix.framework for fix in FIXES}))
        raise UsageError(f"there is no fix for {framework!r}; there are fixes for {known}")
    return found


def find_fix_command(
    mends: str,
    *,
    framework: str | None = None,
    versions: Mapping[str, str] | None = None,
    function: str = "",
    clues: Collection[ClueName] = (),
) -> str:
    """Returns the command that runs a job with the fix for a known failure, and the releases for which it works.

    Returns an empty text if there is no fix. The command for a framework may name fixes for the libraries whose
    functions it calls.

    mends: the short code of the failure, such as FD001.
    framework: the distribution of the job's framework; None if it is not known.
    versions: the known versions of distributions.
    function: a text that names the function in which the failure occurred, such as the frames of a traceback; empty if
        the function is not known.
    clues: the known facts about the run.
    """

    def may_help(fix: FrameworkFix) -> bool:
        version = (versions or {}).get(fix.distribution)
        return (
            mends in fix.mends
            and (framework in (None, fix.distribution) or fix.framework in _USES.get(framework or "", ()))
            and (version is None or SpecifierSet(fix.versions).contains(version, prereleases=True))
        )

    def shows_in(fix: FrameworkFix) -> bool:
        if fix.clue is not None:
            return fix.clue in clues
        if not function:
            return framework is not None or not fix.places
        return any(place in function for place in fix.places or (fix.function,))

    found = [fix for fix in FIXES if may_help(fix) and shows_in(fix)]
    of_frameworks = {fix.framework: [each for each in found if each.framework == fix.framework] for fix in found}
    of_libraries = [fix for fix in found if fix.framework in LIBRARIES]
    alone = [fixes for name, fixes in of_frameworks.items() if name not in LIBRARIES]
    return ", or ".join(_write_command(fixes) for fixes in (*alone, of_libraries) if fixes)


def _write_command(fixes: Iterable[FrameworkFix]) -> str:
    ranges: dict[str, list[str]] = {}
    for fix in fixes:
        ranges.setdefault(fix.distribution, []).append(fix.versions)
    options = " ".join(f"--framework {name}" for name in dict.fromkeys(fix.framework for fix in fixes))
    releases = ", ".join(f"{name} {' or '.join(dict.fromkeys(of_one))}" for name, of_one in ranges.items())
    return f"fsdp-doctor fix {options} -- COMMAND ({releases})"
