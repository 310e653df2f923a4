"""Checks for the codes of quantized weights that were saved as if they were the weights.

Codes are the numbers that a quantizer stores; a weight is a code times its scale.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.record import Arrangement, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# Dtypes of codes, and what follows a weight's name, or takes the place of "weight", in the names of its scales.
_CODES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"})
_SCALES = ("weight_scale_inv", "weight_scale", "scale_weight", "weight_scales", "scale", "scales", "SCB")
_WEIGHT = re.compile(r"(?:^|\.)(?:weight|\w+_proj)$")
_SETTING = re.compile(r"quant|compress", re.IGNORECASE)


def find_codes(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds codes that config.json does not call quantized, and codes that were cast to another dtype.

    A checkpoint of codes has their scales, and a setting with which a load multiplies them. Without the setting a load
    takes the codes for the weights. Cast codes are all on the grid of an 8-bit dtype, and thousands of times larger
    than weights.
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
        if tensor.dtype in _CODES and len(tensor.shape) > 1 and (scale := _find_scale(tensor, names)):
            what = (
                f"the tensor has {tensor.dtype} codes with {scale}, but config.json does not say that it is quantized"
            )
            yield Symptom(Trouble.CODES, what, tensor.file, tensor.name)


def _lacks_setting(evidence: CheckpointEvidence, state: State) -> bool:
    """Returns whether a config.json of transformers' own classes, and the files next to it, name no quantization."""
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
