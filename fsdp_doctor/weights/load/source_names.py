"""Names of the tensors in a source: the model's names, or the names in the Hub's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.source import LoadSource
from fsdp_doctor.weights.load.targets import Target
from fsdp_doctor.weights.names.hub_names import HubNames, Names, NamesError, choose_names
from fsdp_doctor.weights.names.views import TensorView

_T = TypeVar("_T")
_MOST_NAMES = 10


class SourceNames:
    """Names of the tensors in the source of one load.

    If ``names`` is ``auto``, the names of this rank's source decide.
    """

    def __init__(self, names: Names, model: nn.Module, targets: Sequence[Target], source: LoadSource) -> None:
        self._model = model
        self._shapes = {name: target.shape for target in targets for name in target.names}
        self._hub = self._choose(names) if names != "auto" else self._find_in(source.tensors)

    @property
    def word(self) -> str:
        """Digest of the names, equal on ranks with the same names; empty for the model's names."""
        return self._hub.digest if self._hub is not None else ""

    def follow(self, word: str) -> None:
        """Uses the names of the rank that sent ``word``. Raises LoadError if this rank's names differ from them."""
        if not word:
            self._hub = None
            return
        self._hub = self._hub or self._choose("hub")
        if self.word != word:
            raise LoadError(
                "the Hub's names of the model differ here from those on rank 0: every rank needs the same version "
                "of transformers, or the same mapping"
            )

    def divide(self, targets: Sequence[Target]) -> list[Target]:
        """Divides fused targets into the parts that have names in the source.

        Raises LoadError for a part whose elements on this rank are not a slice of the shard.
        """
        if self._hub is None:
            return list(targets)
        parts = [(target, *part) for target in targets for part in self._hub.list_parts(target.names)]
        divided = [_cut(target, names, view) for target, names, view in parts]
        if scattered := [names[0] for (_, names, _), part in zip(parts, divided, strict=True) if part is None]:
            raise LoadError(
                f"{len(scattered)} tensors of the source are parts, such as columns, of tensors whose FSDP1 shards "
                f"cut across these parts: {join_some(scattered, _MOST_NAMES)}; load them by the model's names"
            )
        return [part for part in divided if part is not None]

    def rename(self, reasons: Mapping[str, _T]) -> Mapping[str, _T]:
        """Converts the keys of ``reasons`` from the first names of the model's tensors to the source's names."""
        if self._hub is None:
            return reasons
        return {part[0][0]: why for name, why in reasons.items() for part in self._hub.list_parts((name,))}

    def _choose(self, names: Names) -> HubNames | None:
        try:
            return choose_names(names, self._model, self._shapes)
        except NamesError as error:
            raise LoadError(str(error)) from None

    def _find_in(self, tensors: Mapping[str, object]) -> HubNames | None:
        """Finds the Hub's names; None if the source has the model's names, or if its names are unknown before it is
        read.
        """
        strangers = [name for name in tensors if name not in self._shapes]
        hub = self._choose("auto") if strangers else None
        of_hub = [name for name in strangers if hub is not None and name in hub.views]
        if hub is None or not of_hub:
            return None
        if of_model := [name for name in tensors if name in self._shapes and name not in hub.views]:
            raise LoadError(
                f"the source is half converted: it has {len(of_hub)} tensors by the Hub's names "
                f"({join_some(of_hub)}), and {len(of_model)} by the model's names ({join_some(of_model)})"
            )
        return hub


def _cut(target: Target, names: tuple[str, ...], view: TensorView) -> Target | None:
    """Makes a target of a part of a target; returns None if this rank's elements of the part are not a slice of its
    shard.
    """
    if view.is_whole(target.shape):
        return replace(target, names=names)
    cut = target.layout.cut(target.shape, view)
    if cut is None:
        return None
    layout, part, places = cut

    def shard() -> torch.Tensor:
        return target.shard().view(part.shape)[places]

    return Target(names=names, shape=torch.Size(view.shape), dtype=target.dtype, layout=layout, shard=shard)
