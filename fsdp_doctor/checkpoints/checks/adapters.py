"""Checks LoRA adapters: missing matrices, magnitude vectors and modules, wrong ranks, and B matrices still at zero."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import LAYER, LORA, CheckpointEvidence
from fsdp_doctor.checkpoints.record import SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import format_bytes

# A frozen base that is saved with its adapters causes a warning if it is this many times larger and at least this many
# bytes.
_TIMES_THE_ADAPTERS, _LARGE_BASE = 10, 64 << 20
_DORA = re.compile(r"^(?P<module>.*)\.lora_magnitude_vector\b")


def find_lora(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds LoRA adapters that are incomplete, B matrices still at zero, and a frozen base model.

    An adapter is incomplete if matrix A, matrix B, a magnitude vector or a whole module is missing. Also finds LoRA
    ranks that differ between A and B, or from adapter_config.json.
    """
    halves: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if found := LORA.match(tensor.parameter):
            halves[found["module"]][found["half"]] = tensor
    config = evidence.checkpoint.find_setting(state.directory, "adapter_config.json")
    for module, by_half in halves.items():
        file = next(iter(by_half.values())).file
        if len(by_half) == 1:
            yield Symptom(Trouble.LORA_PAIR, f"the module has only lora_{next(iter(by_half))}", file, module)
        elif state.is_loose:
            continue
        elif not config.get("rank_pattern") and by_half["A"].shape[0] != config.get("r", by_half["A"].shape[0]):
            what = f"lora_A has {by_half['A'].shape[0]} rows, but adapter_config.json says r = {config['r']}"
            yield Symptom(Trouble.SHAPE, what, file, module)
        elif 1 < len(by_half["A"].shape) == len(by_half["B"].shape) and (
            by_half["B"].name == by_half["A"].name.replace("lora_A", "lora_B")
            and by_half["A"].shape[0] != by_half["B"].shape[1]
        ):
            what = f"lora_A has {by_half['A'].shape[0]} rows, but lora_B has {by_half['B'].shape[1]} columns"
            yield Symptom(Trouble.SHAPE, what, file, module)
    yield from _find_missing_adapters(state, halves, config)
    yield from _find_missing_magnitudes(state, halves, config)
    if halves:
        yield from _find_frozen_base(state)
    matrices = [by_half["B"] for by_half in halves.values() if "B" in by_half]
    zero = [tensor for tensor in matrices if evidence.is_zero(tensor)]
    if zero and len(zero) < len(matrices):
        for tensor in zero:
            what = f"lora_B is zero, but {len(matrices) - len(zero)} of {len(matrices)} are not"
            yield Symptom(Trouble.LORA_ZERO, what, tensor.file, tensor.name)
    elif zero:
        step = evidence.checkpoint.find_setting(state.directory, "trainer_state.json").get("global_step")
        trouble = Trouble.LORA_ZERO if isinstance(step, int) and step > 0 else Trouble.LORA_START
        after = f" after {step} steps" if trouble is Trouble.LORA_ZERO else ""
        yield Symptom(trouble, f"all {len(zero)} lora_B are zero{after}", zero[0].file)


def _find_frozen_base(state: State) -> Iterator[Symptom]:
    """Finds a frozen base model that is saved with its adapters and is many times larger than the adapters."""
    tensors = list(state.select("model"))
    adapters = sum(tensor.numel * tensor.itemsize for tensor in tensors if LORA.match(tensor.parameter))
    base = sum(tensor.numel * tensor.itemsize for tensor in tensors if not LORA.match(tensor.parameter))
    if base >= max(_TIMES_THE_ADAPTERS * adapters, _LARGE_BASE):
        what = f"the frozen base takes {format_bytes(base)}, the adapters {format_bytes(adapters)}"
        yield Symptom(Trouble.FROZEN_BASE, what, tensors[0].file)


def _find_missing_magnitudes(
    state: State, halves: Mapping[str, dict[str, SavedTensor]], config: Mapping[str, Any]
) -> Iterator[Symptom]:
    """Finds adapters without a magnitude vector if adapter_config.json says DoRA, or if at least half of the adapters
    have a magnitude vector.
    """
    modules = {found["module"] for tensor in state.select("model") if (found := _DORA.match(tensor.parameter))}
    lacking = sorted(halves.keys() - modules)
    if lacking and (config.get("use_dora") is True or 2 * len(lacking) <= len(halves)):
        for module in lacking:
            what = f"the module has no lora_magnitude_vector, which {len(halves) - len(lacking)} of {len(halves)} have"
            yield Symptom(Trouble.LORA_PAIR, what, next(iter(halves[module].values())).file, module)


def _find_missing_adapters(
    state: State, halves: Mapping[str, dict[str, SavedTensor]], config: Mapping[str, Any]
) -> Iterator[Symptom]:
    """Finds modules that lack an adapter in some layers, and target modules that have no adapter at all."""
    by_kind: dict[tuple[str, str], set[int]] = defaultdict(set)
    for module in halves:
        if found := LAYER.match(module):
            by_kind[found["stack"], found["rest"]].add(int(found["number"]))
    targets = config.get("target_modules")
    is_by_layer = any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if is_by_layer or not isinstance(targets, list) or not state.files:
        return
    for (stack, rest), numbers in by_kind.items():
        layers = set().union(*(each for (other, _), each in by_kind.items() if other == stack))
        for number in sorted(layers - numbers) if rest.rpartition(".")[2] in targets else ():
            what = (
                f"{len(numbers)} of {len(layers)} layers have this module, but adapter_config.json names it for "
                "all layers"
            )
            yield Symptom(Trouble.ADAPTER_PART, what, state.files[0], f"{stack}.{number}.{rest}")
    for target in sorted(map(str, targets)):
        if halves and not any(f".{module}".endswith(f".{target}") for module in halves):
            what = f"adapter_config.json names {target}, but no tensor belongs to it"
            yield Symptom(Trouble.NO_TARGET, what, state.files[0])
