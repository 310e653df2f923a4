"""Failures that are none of FSDP's: whether one is, and what kind it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What names FSDP, a DTensor or a sharded checkpoint, in a message or where it was raised.
_FIELD = re.compile(
    r"torch/distributed/(?:fsdp|_composable|_?tensor/|checkpoint/|_shard|_state_dict_utils)|DTensor|FSDP|FullySharded"
    r"|fully_shard|full_tensor|flat_param|_fsdp_|_OptimStateKey|ShardedTensor|summon_full_params"
)
# What is raised wherever the program happens to be, so that its traceback says nothing: a kernel fails later than it is
# launched, and every write to a full disk fails.
_ANYWHERE = re.compile(r"device-side assert|No space left on device|Disk quota exceeded|Read-only file system")
_INNERMOST = 3
_GATHERING = re.compile(r"state_dict|full_tensor|summon_full_params|save_pretrained|save_model|save_checkpoint")

# By what the user reads; the first that fits.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "a package that cannot be imported, or does not fit the others",
        re.compile(r"^(?:ImportError|ModuleNotFoundError)|undefined symbol|cannot open shared object|No module named"),
    ),
    (
        "a network or a host that cannot be reached",
        re.compile(
            r"^(?:ConnectionError|MaxRetryError|SSLError|ProxyError|ReadTimeout|ConnectTimeout|URLError|gaierror)"
            r"|Name or service|name resolution|Network is unreachable|Connection refused|couldn't connect to|EADDRINUSE"
            r"|address already in use",
            re.IGNORECASE,
        ),
    ),
    (
        "a model, tokenizer or data set that cannot be loaded",
        re.compile(
            r"Can't load (?:the )?\w+|gated repo|is not a local folder|RepositoryNotFound|HFValidationError"
            r"|LocalEntryNotFound|not a valid model identifier|40[134] Client Error|DatasetNotFound"
            r"|does not appear to have a file named"
        ),
    ),
    (
        "a file, or the right to use something",
        re.compile(
            r"^(?:FileNotFoundError|PermissionError|IsADirectoryError|NotADirectoryError)|No such file"
            r"|Permission denied|Operation not permitted|No space left|Read-only file system|Disk quota"
        ),
    ),
    (
        "a torch that does not fit the machine",
        re.compile(r"not compiled with CUDA|Found no NVIDIA|CUDA driver version|No CUDA GPUs|no kernel image|NVML"),
    ),
    (
        "the inference engine and its memory",
        re.compile(r"Free memory on device|KV cache|gpu_memory_utilization|EngineCore|EngineDeadError|max_model_len"),
    ),
    ("memory of the host", re.compile(r"node running low on memory|DefaultCPUAllocator|[Cc]annot allocate memory")),
    ("memory of the device, in training or in an engine", re.compile(r"out of memory|OutOfMemory|OOM", re.IGNORECASE)),
    (
        "NCCL, its network or its driver",
        re.compile(r"NCCL error|nccl(?:Unhandled|Internal|System|InvalidUsage)|unhandled system error"),
    ),
    (
        "a kernel on the device",
        re.compile(r"CUDA error|device-side assert|illegal memory access|CUBLAS|cuDNN|Triton|triton"),
    ),
    (
        "the configuration or the command line",
        re.compile(
            r"unrecognized arguments|ConfigAttributeError|ConfigKeyError|MissingMandatoryValue|not in struct"
            r"|HfArgumentParser|Could not override|Overriding|ValidationError|unexpected keyword argument"
        ),
    ),
    (
        "the data or its loading",
        re.compile(r"DataLoader|collate|\bdataset|num_samples|JSONDecodeError|pyarrow|parquet", re.IGNORECASE),
    ),
)


def names_our_field(message: str, frames: Sequence[str], *, under_fsdp: bool) -> bool:
    """Whether the message, or the innermost frames, name FSDP, a DTensor or a sharded checkpoint.

    Under FSDP any traceback that goes through a state dict or a gather does.
    """
    if is_raised_anywhere(message):
        return False
    named = any(_FIELD.search(text) for text in (message, *frames[-_INNERMOST:]))
    return named or (under_fsdp and any(map(gathers, frames)))


def is_raised_anywhere(message: str) -> bool:
    """Whether its traceback is only where the program happened to be."""
    return _ANYWHERE.search(message) is not None


def gathers(frames: str) -> bool:
    """Whether a traceback goes through a state dict or a gather of a model."""
    return _GATHERING.search(frames) is not None


def kind_of(message: str) -> str:
    """What failed, as a noun; empty where the message does not say."""
    return next((kind for kind, pattern in _KINDS if pattern.search(message)), "")
