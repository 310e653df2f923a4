"""Two fingerprints side by side: which tensors differ, and how, where that can be told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.errors import some
from fsdp_doctor.fingerprints.fingerprint_set import (
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
    "shape",
    "dtype",
    "values",
]
VariantKind: TypeAlias = Literal["transposed", "halves swapped", "cast twice"]


@dataclass(frozen=True)
class FingerprintDifference:
    """One tensor that the engine does not hold as the trainer has it. detail: how it differs, a part of a sentence."""

    name: str
    kind: DifferenceKind
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class FingerprintVariant:
    """What a tensor's sums would be after a certain mistake. detail: as of a difference."""

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
    called: tuple[str, str] = ("the trainer", "the engine"),
) -> list[FingerprintDifference]:
    """Every tensor that differs, in the trainer's order, then what the engine has beside; empty if none does.

    That a tensor is missing in the engine is no difference where the trainer ties it to one that is there.

    history: the trainer's fingerprints of earlier steps, the last one last, by which stale tensors are known.
    base: those of the model without its adapters (``fingerprint(model, lora="base")``).
    variants: of tensors that differ, what :func:`fingerprint_variants` finds on the trainer: which of them were
        transposed, had their halves swapped, or were cast twice.
    called: how the two sides are named in what is said about them.

    Raises FingerprintError for fingerprints of versions that sum otherwise, of parts of tensors only, and of models
    that have nothing in common.
    """
    if not isinstance(history, Sequence):
        raise TypeError(f"a history is a sequence of Fingerprints, not {type(history).__name__}")
    given = [(f"the fingerprints of {name}", found) for found, name in zip((trainer, engine), called, strict=True)]
    given += [(f"the fingerprints of {len(history) - at} steps before", found) for at, found in enumerate(history)]
    given += [("the fingerprints of the base", base)] if base is not None else []
    for whose, found in given:
        require_fingerprints(found, whose)
        found.require_whole(whose)
    known = _Known(trainer, engine, history, base, variants or {}, called)
    _require_one_model(known)
    return [*_of_trainers_tensors(known), *_superfluous(known)]


def _require_one_model(known: _Known) -> None:
    trainer, engine = known.trainer, known.engine
    common = [name for name in trainer.tensors if name in engine.tensors]
    if (trainer.tensors or engine.tensors) and not common:
        raise FingerprintError(
            f"fingerprints of different models, or by different names: {known.trainers_name} has "
            f"{some(trainer.tensors, 2)}, {known.engines_name} {some(engine.tensors, 2)}"
        )
    if common and all(trainer.tensors[name].numel != engine.tensors[name].numel for name in common):
        raise FingerprintError(
            f"fingerprints of different models: none of the {len(common)} tensors that both have is of the same size"
        )


class _Known:
    """All that is there to explain a difference with."""

    def __init__(
        self,
        trainer: Fingerprints,
        engine: Fingerprints,
        history: Sequence[Fingerprints],
        base: Fingerprints | None,
        variants: Mapping[str, Sequence[FingerprintVariant]],
        called: tuple[str, str],
    ) -> None:
        self.trainer, self.engine, self.history, self.base, self.variants = trainer, engine, history, base, variants
        self.trainers_name, self.engines_name = called
        self.tied_to = {name: [one for one in names if one != name] for names in trainer.tied for name in names}
        self.by_values: dict[TensorFingerprint, list[str]] = {}
        for name, one in trainer.tensors.items():
            self.by_values.setdefault(one, []).append(name)


def _of_trainers_tensors(known: _Known) -> Iterator[FingerprintDifference]:
    for name, wanted in known.trainer.tensors.items():
        held = known.engine.tensors.get(name)
        if held is None:
            if not any(other in known.engine.tensors for other in known.tied_to.get(name, ())):
                yield FingerprintDifference(name, "missing", f"{known.engines_name} does not have it")
        elif held != wanted:
            kind, detail = _explanation(known, name, wanted, held)
            yield FingerprintDifference(name, kind, detail)


def _explanation(
    known: _Known, name: str, wanted: TensorFingerprint, held: TensorFingerprint
) -> tuple[DifferenceKind, str]:
    """The first that fits, the most telling ones first."""
    for steps, before in enumerate(reversed(known.history), start=1):
        if before.tensors.get(name) == held:
            when = f"{steps} {'step' if steps == 1 else 'steps'} before"
            return "stale", f"stale: it is what {known.trainers_name} had {when}"
    if known.base is not None and known.base.tensors.get(name) == held:
        return "base", "it is the base weight, without the adapter"
    for variant in known.variants.get(name, ()):
        if variant.lanes == held.lanes:
            return variant.kind, variant.detail
    if held.lanes == wanted.lanes and held.dtype == wanted.dtype:
        # Zeros add nothing to a sum, so it does not tell how many of them are behind the others.
        zeros = "" if held.numel == wanted.numel else ", but for zeros at the end,"
        return "shape", f"the same values{zeros} in the shape {list(held.shape)}, not {list(wanted.shape)}"
    return _other_tensor(known, name, held) or _form(wanted, held)


def _other_tensor(known: _Known, name: str, held: TensorFingerprint) -> tuple[DifferenceKind, str] | None:
    """Whether it has to do with another tensor of the model."""
    others = [other for other in known.by_values.get(held, ()) if other != name]
    for other in others:
        if known.engine.tensors.get(other) == known.trainer.tensors[name]:
            return "swapped", f"swapped with {other}"
    if others:
        tied = any(known.engine.tensors.get(other) == held for other in others)
        if tied and any(name in names and others[0] in names for names in known.engine.tied):
            return "tied", f"{known.engines_name} ties it to {others[0]}, and {known.trainers_name} does not"
        return "swapped", f"it holds the values of {others[0]}"
    for other in known.tied_to.get(name, ()):
        if known.engine.tensors.get(other) == known.trainer.tensors[other]:
            return (
                "untied",
                f"{known.trainers_name} ties it to {other}, which is right; this name has other values",
            )
    return None


def _form(wanted: TensorFingerprint, held: TensorFingerprint) -> tuple[DifferenceKind, str]:
    if held.shape != wanted.shape:
        return "shape", f"it has the shape {list(held.shape)}, not {list(wanted.shape)}"
    if held.dtype != wanted.dtype:
        return "dtype", f"it is {held.dtype}, not {wanted.dtype}"
    return "values", "it holds other values"


def _superfluous(known: _Known) -> Iterator[FingerprintDifference]:
    for name, held in known.engine.tensors.items():
        if name in known.trainer.tensors:
            continue
        same = known.by_values.get(held)
        beside = f"; it has the values of {same[0]}" if same else ""
        yield FingerprintDifference(name, "superfluous", f"{known.trainers_name} does not have it{beside}")
