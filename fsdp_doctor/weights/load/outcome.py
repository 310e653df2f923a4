"""Result of a load: a report, or an error that every rank raises."""

from __future__ import annotations

from dataclasses import dataclass


class LoadError(RuntimeError):
    """Error of a load that loaded nothing, or not everything.

    The message says why, on which rank, and whether anything was written.
    """


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Report of a load, the same on every rank.

    loaded: the number of tensors that were written.
    checked: the number of written tensors that were compared with the checksums that :func:`save_full_tensors` wrote
        next to the files.
    missing: the model's names of tensors that the source does not have; they are unchanged.
    superfluous: names in the source that the model does not have.
    extra_states: names of the results of the model's ``get_extra_state`` methods, which no load sets, even if the
        source has them.
    buffers_not_given: names of non-persistent buffers, which no source has, that were not among ``buffers`` either.
        They keep their former values, which are undefined after ``to_empty``.
    without_state: parameters for which an optimizer's checkpoint has no state, because they never had a gradient.
    discarded: parameters whose gradients the load discarded on this rank; the only field that may differ between ranks.
        A step that raised had left these gradients unreduced. ``optimizer.zero_grad()`` does not reach them, and the
        next backward would add to them.
    """

    loaded: int
    checked: int = 0
    missing: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    extra_states: tuple[str, ...] = ()
    buffers_not_given: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
