"""What a load ends with: an account of it, or an error that all ranks have."""

from __future__ import annotations

from dataclasses import dataclass


class LoadError(RuntimeError):
    """Nothing, or not everything, was loaded; the message says why, on which rank, and whether anything was written."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The same on every rank.

    loaded: how many tensors were written. missing: names, as the model has them, of what the source did not have and
    what is as it was. superfluous: names that the source had and the model does not have. without_state: the
    parameters for which an optimizer's checkpoint has no state, because they never had a gradient.
    """

    loaded: int
    missing: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
