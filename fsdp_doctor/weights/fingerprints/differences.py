"""Compares two fingerprints: which tensors differ and, as far as the sums show it, how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    Lanes,
    TensorFingerprint,
    require_fingerprints,
)

DifferenceKind: TypeAlias = Literal[
    "missing",
    "superfluous",
    "stale",
    "base",
    "swapped",
    "tied",
    "untied",
    "transposed",
    "halves swapped",
    "cast twice",
    "rounded",
    "shape",
    "dtype",
    "values",
    "not comparable",
]
VariantKind: TypeAlias = Literal["transposed", "halves swapped", "cast twice", "rounded"]


@dataclass(frozen=True)
class FingerprintDifference:
    """Difference of one tensor between engine and trainer.

    detail: a phrase that says how the tensor differs.
    """

    name: str
    kind: DifferenceKind
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class FingerprintVariant:
    """Sums that a tensor would have after a certain mistake.

    detail: a phrase for :class:`FingerprintDifference`.
    """

    kind: VariantKind
    detail: str
    lanes: Lanes


def compare_fingerprints(
    trainer: Fingerprints,
    engine: Fingerprints,
    *,
    history: Sequence[Fingerprints] = (),
    base: Fingerprints | None = None,
    variants: Mapping[str, Sequence[FingerprintVariant]] | None = None,
    not_comparable: Mapping[str, str] | None = None,
    called: tuple[str, str] = ("the trainer", "the engine"),
) -> list[FingerprintDifference]:
    """Lists the tensors that differ, in the trainer's order, followed by the tensors that only the engine has.

    A tensor that the engine lacks is no difference if the trainer ties it to a tensor that the engine has.

    history: the trainer's fingerprints of earlier steps, oldest first, by which stale tensors are recognized.
    base: the fingerprints of the model without its adapters (``fingerprint(model, lora="base")``).
    variants: the result of :func:`fingerprint_variants` on the trainer for tensors that differ; it shows which of them
        were transposed, had their halves swapped, or were cast twice.
    not_comparable: by name, why the engine has no counterpart of a tensor, such as a kernel's layout or a quantization.
        The tensor is listed as ``not comparable``, whatever its sums are.
    called: the names of the two sides in the details.

    Raises FingerprintError for fingerprints made by different versions of the sum, for fingerprints of parts of
    tensors, and for models that have no tensor in common.
    """
    if not isinstance(history, Sequence):
        raise TypeError(f"a history is a sequence of Fingerprints, not {type(history).__name__}")
    inputs = {f"the fingerprints of {name}": side for side, name in zip((trainer, engine), called, strict=True)}
    inputs |= {f"the fingerprints of {len(history) - index} steps before": s for index, s in enumerate(history)}
    inputs |= {"the fingerprints of the base": base} if base is not None else {}
    for whose, fingerprints in inputs.items():
        require_fingerprints(fingerprints, whose)
        fingerprints.require_whole(whose)
    reasons = not_comparable or {}
    if unknown := [name for name in reasons if name not in trainer.tensors and name not in engine.tensors]:
        raise FingerprintError(f"{join_some(unknown, 2)} is listed as not comparable, but neither side has it")
    comparison = _Comparison(trainer, engine, history, base, variants or {}, reasons, *called)
    comparison.require_one_model()
    return [*comparison.find_differences(), *comparison.find_superfluous()]


@dataclass
class _Comparison:
    trainer: Fingerprints
    engine: Fingerprints
    history: Sequence[Fingerprints]
    base: Fingerprints | None
    variants: Mapping[str, Sequence[FingerprintVariant]]
    not_comparable: Mapping[str, str]
    trainers_name: str
    engines_name: str

    def __post_init__(self) -> None:
        self.tied_to = {name: [n for n in names if n != name] for names in self.trainer.tied for name in names}
        self.names_by_values: dict[TensorFingerprint, list[str]] = {}
        for name, tensor in self.trainer.tensors.items():
            self.names_by_values.setdefault(tensor, []).append(name)

    def require_one_model(self) -> None:
        trainers, engines = self.trainer.tensors, self.engine.tensors
        common = [name for name in trainers if name in engines]
        if (trainers or engines) and not common:
            raise FingerprintError(
                f"fingerprints of different models, or by different names: {self.trainers_name} has "
                f"{join_some(trainers, 2)}, {self.engines_name} {join_some(engines, 2)}"
            )
        if common and all(trainers[name].numel != engines[name].numel for name in common):
            raise FingerprintError(
                f"fingerprints of different models: none of the {len(common)} common tensors has the same size"
            )

    def find_differences(self) -> Iterator[FingerprintDifference]:
        for name, expected in self.trainer.tensors.items():
            actual = self.engine.tensors.get(name)
            if name in self.not_comparable:
                yield FingerprintDifference(name, "not comparable", f"not comparable: {self.not_comparable[name]}")
            elif actual is None:
                if not any(other in self.engine.tensors for other in self.tied_to.get(name, ())):
                    yield FingerprintDifference(name, "missing", f"{self.engines_name} does not have this tensor")
            elif actual != expected:
                yield FingerprintDifference(name, *self._explain(name, expected, actual))

    def find_superfluous(self) -> Iterator[FingerprintDifference]:
        for name, actual in self.engine.tensors.items():
            if name in self.not_comparable and name not in self.trainer.tensors:
                yield FingerprintDifference(name, "not comparable", f"not comparable: {self.not_comparable[name]}")
            elif name not in self.trainer.tensors:
                same = self.names_by_values.get(actual)
                addition = f"; its values are those of {same[0]}" if same else ""
                yield FingerprintDifference(
                    name, "superfluous", f"{self.trainers_name} does not have this tensor{addition}"
                )

    def _explain(self, name: str, expected: TensorFingerprint, actual: TensorFingerprint) -> tuple[DifferenceKind, str]:
        """Returns the kind of difference and its detail; the most specific explanation wins."""
        for steps, before in enumerate(reversed(self.history), start=1):
            if before.tensors.get(name) == actual:
                when = f"{steps} {'step' if steps == 1 else 'steps'} before"
                return "stale", f"stale: the values are those of {self.trainers_name} {when}"
        if self.base is not None and self.base.tensors.get(name) == actual:
            return "base", "the tensor is the base weight, without the adapter"
        for variant in self.variants.get(name, ()):
            if variant.lanes == actual.lanes:
                return variant.kind, variant.detail
        if actual.lanes == expected.lanes and actual.dtype == expected.dtype:
            # Zeros add nothing to a sum, so it does not tell how many are at the end.
            zeros = "" if actual.numel == expected.numel else ", except zeros at the end,"
            return "shape", f"the same values{zeros} in the shape {list(actual.shape)}, not {list(expected.shape)}"
        if explanation := self._explain_by_other_tensor(name, actual):
            return explanation
        if actual.shape != expected.shape:
            return "shape", f"the shape is {list(actual.shape)}, not {list(expected.shape)}"
        if actual.dtype != expected.dtype:
            return "dtype", f"the dtype is {actual.dtype}, not {expected.dtype}"
        return "values", "the values are different"

    def _explain_by_other_tensor(self, name: str, actual: TensorFingerprint) -> tuple[DifferenceKind, str] | None:
        engines = self.engine.tensors
        others = [other for other in self.names_by_values.get(actual, ()) if other != name]
        for other in others:
            if engines.get(other) == self.trainer.tensors[name]:
                return "swapped", f"swapped with {other}"
        if others:
            ties = any(name in names and others[0] in names for names in self.engine.tied)
            if ties and any(engines.get(other) == actual for other in others):
                return "tied", f"{self.engines_name} ties this tensor to {others[0]}, but {self.trainers_name} does not"
            return "swapped", f"the values are those of {others[0]}"
        for other in self.tied_to.get(name, ()):
            if engines.get(other) == self.trainer.tensors[other]:
                return "untied", (
                    f"{self.trainers_name} ties this name to {other}; the values of {other} are right, these are not"
                )
        return None
