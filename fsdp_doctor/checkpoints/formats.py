"""Formats of other programs: they are recognized by their files but not read, and each names a tool that reads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class OtherFormat(NamedTuple):
    """Format that is recognized but not read, described by regular expressions.

    ``files`` matches file names, one of which is enough; ``beside`` matches other files, one of which must also
    exist. ``directories`` matches names of directories whose whole contents have the format. ``setting`` is a key and
    value in the directory's ``metadata.json`` that identify the format. ``tool`` says which program reads it. If
    ``is_copy`` is true, the files may lie next to a model in a format that is read; only that model is judged then.
    """

    name: str
    files: str
    tool: str
    directories: str = ""
    beside: str = ""
    setting: tuple[str, str] | None = None
    is_copy: bool = False

    def describes(self, directories: Collection[str], names: Collection[str], settings: Mapping[str, Any]) -> bool:
        if self.setting is not None and settings.get(self.setting[0]) == self.setting[1]:
            return True
        if self.beside and not any(re.fullmatch(self.beside, name) for name in names):
            return False
        return bool(self.list_files(names)) or self.owns(directories)

    def list_files(self, names: Collection[str]) -> list[str]:
        return sorted(name for name in names if self.files and re.fullmatch(self.files, name))

    def owns(self, directories: Collection[str]) -> bool:
        """Returns whether a directory with one of these names contains only files of this format."""
        return any(self.directories and re.fullmatch(self.directories, name) for name in directories)


OTHER_FORMATS = (
    OtherFormat(
        "DeepSpeed's universal checkpoint",
        r"universal_checkpoint_info|latest_universal",
        "DeepSpeed reads it with load_universal",
        directories=r"global_step\d+_universal",
    ),
    OtherFormat(
        "DeepSpeed ZeRO",
        r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+(_\d+)?_(model|optim)_states\.pt|mp_rank_\d+(_\d+)?_model_states\.pt"
        r"|layer_\d+-model(_\d+)?-model_states\.pt",
        "python zero_to_fp32.py, which DeepSpeed puts next to it, writes whole weights",
    ),
    OtherFormat(
        "Megatron-FSDP",
        "",
        "Megatron-Bridge's AutoBridge.export_ckpt writes Hugging Face files",
        setting=("sharded_backend", "fsdp_dtensor"),
    ),
    OtherFormat(
        "Megatron (torch_dist)",
        r"common\.pt",
        "Megatron-Bridge's AutoBridge.export_ckpt, or tools/checkpoint/convert.py of Megatron-LM, writes other files",
        beside=r"metadata\.json",
        setting=("sharded_backend", "torch_dist"),
    ),
    OtherFormat(
        "Megatron",
        r"model_optim_rng\.pt|distrib_optim\.pt",
        "tools/checkpoint/convert.py of Megatron-LM writes other files",
        directories=r"mp_rank_\d\d(_\d{3}){0,2}",
    ),
    OtherFormat(
        "NeMo",
        r".*\.nemo|model_weights\.ckpt|nemo_model_config\.yaml",
        "NeMo's export_ckpt writes Hugging Face files",
        directories=r".*\.nemo",
    ),
    OtherFormat(
        "Orbax (JAX)",
        r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|_sharding",
        "orbax.checkpoint reads it",
        directories=r"ocdbt\.process_\d+",
    ),
    OtherFormat(
        "TensorRT-LLM",
        r"rank\d+\.(safetensors|engine)",
        "trtllm-build and TensorRT-LLM read it; it is divided for that engine",
    ),
    OtherFormat(
        "vLLM's sharded_state",
        r"model-rank-\d+-part-\d+\.safetensors",
        "vLLM reads it with load_format=sharded_state; it is divided for tensor parallelism",
    ),
    OtherFormat(
        "the original Llama",
        r"consolidated\.\d\d\.pth",
        "convert_llama_weights_to_hf.py of transformers writes Hugging Face files",
        is_copy=True,
    ),
    OtherFormat("GGUF", r".*\.gguf", "llama.cpp reads it", is_copy=True),
    OtherFormat("ONNX", r".*\.onnx(_data|\.data)?", "onnxruntime reads it", is_copy=True),
    OtherFormat(
        "TensorFlow",
        r"tf_model(-\d+-of-\d+)?\.h5|saved_model\.pb|.*\.ckpt\.index|.*\.data-\d{5}-of-\d{5}|.*\.(keras|h5)",
        "from_pretrained(from_tf=True) of transformers 4 reads it",
        is_copy=True,
    ),
    OtherFormat(
        "Flax",
        r"flax_model(-\d+-of-\d+)?\.msgpack|.*\.msgpack",
        "from_pretrained(from_flax=True) of transformers 4 reads it",
        is_copy=True,
    ),
    OtherFormat("MLX", r"weights(\.\d+)?\.npz|.*\.npz", "mlx_lm reads it", is_copy=True),
    OtherFormat("Core ML", r".*\.mlmodel", "coremltools reads it", directories=r".*\.mlpackage", is_copy=True),
    OtherFormat(
        "a packed file",
        r".*\.(pt|pth|bin|ckpt|safetensors|distcp)\.(zst|gz|xz|bz2|lz4)|.*\.(tar\.\w+|tgz|zip)|.*(?<!\.pth)\.tar",
        "unpack the file, and pass its contents",
        is_copy=True,
    ),
)
# Frameworks other than torch that the header of a safetensors file may name; they use other layouts of the weights.
OTHER_WRITERS = {"mlx": "MLX (mlx_lm reads it)", "tf": "TensorFlow", "flax": "Flax"}
KNOWN_FORMATS = "DCP, a file of each rank, Hugging Face files, files of torch.save"


def find_other_format(
    directories: Collection[str], names: Collection[str], settings: Mapping[str, Any]
) -> OtherFormat | None:
    """Returns the format of a directory's files if that format is recognized but not read, otherwise None.

    ``directories`` are the names of the directory and its parents. ``settings`` is the content of its
    ``metadata.json``.
    """
    return next((each for each in OTHER_FORMATS if each.describes(directories, names, settings)), None)
