"""Finds the versions of packages that a log names."""

from __future__ import annotations

import re

from fsdp_doctor.fixes.entry import DISTRIBUTIONS

# The distributions whose versions decide which failures occur and which fixes there are.
_PACKAGES = (
    *("torch", "vllm", "sglang", "ray", "torchtitan", "torchao", "safetensors", "bitsandbytes", "deepspeed", "axolotl"),
    *("flash-attn", "triton", "numpy", *DISTRIBUTIONS),
)
_ALIASES = {"pytorch": "torch", "pytorch-lightning": "lightning", "flash_attn": "flash-attn"}
PACKAGE_NAME = "|".join(sorted((*_PACKAGES, *_ALIASES), key=len, reverse=True))
VERSION = re.compile(
    rf"(?<![\w/.-])`?(?P<name>{PACKAGE_NAME})`?(?: version)?\s{{0,3}}(?:==|=|:)?\s{{0,8}}"
    r"v?(?P<version>\d+\.\d+(?:\.\w+)*(?:\+\w+)?)",
    re.IGNORECASE,
)
# How each may be written, and how many times in one piece a log is searched for it.
_WRITTEN = (*_PACKAGES, *_ALIASES, "PyTorch", "Torch", "Transformers", "Accelerate", "Lightning")
_MAX_PLACES = 32


class VersionReader:
    """Finds the versions that a log names; of several versions of one package the first counts."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}

    def read(self, text: str) -> None:
        """Reads the next piece of the log."""
        for name in _WRITTEN:
            package, at = find_package(name), text.find(name)
            for _ in range(_MAX_PLACES):
                if at < 0 or package in self.versions:
                    break
                if match := VERSION.match(text, at):
                    self.versions[package] = match["version"]
                at = text.find(name, at + len(name))


def find_package(name: str) -> str:
    """Returns the name of the distribution that is written as ``name``."""
    return _ALIASES.get(name.lower(), name.lower())
