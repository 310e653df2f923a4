"""Checks the codes of quantized weights: codes saved as if they were the weights, and codes whose scales do not fit.

Codes are the numbers that a quantizer stores; a weight is a code times its scale.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.record import Arrangement, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# Dtypes of codes, and what follows a weight's name, or takes the place of "weight", in the names of its scales.
_CODES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"})
_SCALES = ("weight_scale_inv", "weight_scale", "scale_weight", "weight_scales", "scale", "scales", "SCB")
_WEIGHT = re.compile(r"(?:^|\.)(?:weight|\w+_proj)$")
_SETTING = re.compile(r"quant|compress", re.IGNORECASE)
# Tensors that each packed tensor of a quantizer needs next to it, by the last part of the packed tensor's name.
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "gptq": {"qweight": ("scales", "qzeros")},
    "awq": {"qweight": ("scales", "qzeros")},
    "compressed-tensors": {"weight_packed": ("weight_scale",)},
}


def find_codes(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds codes that config.json does not call quantized, and codes that were cast to another dtype.

    A quantized checkpoint has scales for its codes, and a setting that makes the loader multiply codes by scales.
    Without the setting the codes are loaded as weights. Cast codes are all on the grid of an 8-bit dtype, and thousands
    of times larger than weights.
    """
    for tensor in state.select("model"):
        is_weight = len(tensor.shape) > 1 and _WEIGHT.search(tensor.name)
        kinds = {scan.looks_coded for _, scan in evidence.find_scans(tensor) if is_weight}
        if len(kinds) == 1 and (kind := next(iter(kinds))):
            what = (
                f"the values of this {tensor.dtype} tensor are {kind} codes, which were not multiplied by their scales"
            )
            yield Symptom(Trouble.CODES, what, tensor.file, tensor.name)
    if state.arrangement is not Arrangement.WHOLE or not _lacks_setting(evidence, state):
        return
    names = {tensor.name for tensor in state.tensors.values()}
    for tensor in state.select("model"):
        if tensor.dtype not in _CODES or len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        what = ""
        if scale := _find_scale(tensor, names):
            what = (
                f"the tensor has {tensor.dtype} codes with {scale}, but config.json does not say that it is quantized"
            )
        elif tensor.dtype == "int8":  # float8 may be a dtype of weights
            what = "the tensor has int8 codes, but no scale, and config.json does not say that it is quantized"
        if what:
            yield Symptom(Trouble.CODES, what, tensor.file, tensor.name)


def compare_scales(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds codes of a quantized model that lack their scales, or whose scales have another number of blocks."""
    config = evidence.checkpoint.find_setting(state.directory, "config.json").get("quantization_config")
    if not isinstance(config, dict) or state.arrangement is not Arrangement.WHOLE or state.is_incomplete:
        return
    tensors = {tensor.name: tensor for tensor in state.select("model")}
    method, kinds = str(config.get("quant_method")), {tensor.last_name for tensor in tensors.values()}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if tensor.dtype == "uint8" and kind == "weight" and method == "bitsandbytes":
            lacking = [] if f"{name}.absmax" in tensors else [f"{name}.absmax"]
        elif tensor.dtype == "int8" and kind == "weight" and method == "bitsandbytes":
            lacking = [] if f"{module}.SCB" in tensors else [f"{module}.SCB"]
        elif tensor.dtype in _CODES and kind == "weight" and method == "compressed-tensors":
            lacking = [] if f"{module}.weight_scale" in tensors else [f"{module}.weight_scale"]
        else:
            needed = [each for each in _NEEDED.get(method, {}).get(kind, ()) if each in kinds or each == "scales"]
            lacking = [f"{module}.{each}" for each in needed if f"{module}.{each}" not in tensors]
        if lacking:
            what = f"the tensor has {tensor.dtype} codes, but {lacking[0]} is missing"
            yield Symptom(Trouble.SCALES, what, tensor.file, name)
    if method == "fp8":
        yield from _compare_blocks(tensors, config)


def _compare_blocks(tensors: Mapping[str, SavedTensor], config: Mapping[str, Any]) -> Iterator[Symptom]:
    """Compares the numbers of float8 blocks with the numbers of their scales."""
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if not tensor.dtype.startswith("float8") or not name.endswith(".weight") or len(tensor.shape) != 2:
            continue
        expected = tuple(-(-length // size) for length, size in zip(tensor.shape, block, strict=True))
        if scale is None:
            what = f"the tensor has {tensor.dtype} codes, but {name}_scale_inv is missing"
            yield Symptom(Trouble.SCALES, what, tensor.file, name)
        elif scale.shape != expected:
            what = f"the scales are {list(scale.shape)}, but the weight has {list(expected)} blocks"
            yield Symptom(Trouble.SCALES, what, scale.file, scale.name)


def _lacks_setting(evidence: CheckpointEvidence, state: State) -> bool:
    """Returns whether config.json describes one of transformers' own classes without a quantization.

    False if a file next to config.json names a quantization, or if a single file is examined.
    """
    config = evidence.checkpoint.find_setting(state.directory, "config.json")
    inner = config.get("text_config")
    keys = {*config, *(inner if isinstance(inner, dict) else {})}
    here = pathlib.PurePath(state.directory)
    beside = [path.name for path in map(pathlib.PurePath, evidence.checkpoint.settings) if path.parent == here]
    is_plain = isinstance(config.get("model_type"), str) and "auto_map" not in config
    return is_plain and not evidence.checkpoint.is_one_file and not any(map(_SETTING.search, [*keys, *beside]))


def _find_scale(tensor: SavedTensor, names: set[str]) -> str:
    module = tensor.name.removesuffix(".weight")
    beside = [*(f"{module}.{scale}" for scale in _SCALES), f"{tensor.name}_scale_inv", f"{tensor.name}_scale"]
    return next((name for name in beside if name in names and tensor.name.endswith(".weight")), "")
