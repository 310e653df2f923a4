"""The result of a load: a report, or an error that every rank raises."""

from __future__ import annotations

from dataclasses import dataclass


class LoadError(RuntimeError):
    """Nothing, or not everything, was loaded; the message says why, on which rank, and whether anything was written."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Report of a load, the same on every rank.

    loaded: how many tensors were written.
    checked: how many of them were compared, in their files, with the sums that :func:`save_full_tensors` left.
    missing: the model's names of tensors that the source does not have; they are unchanged.
    superfluous: names in the source that the model does not have.
    extra_states: names of what the model's ``get_extra_state`` methods return, which no load sets, whether the source
    has it or not.
    buffers_not_given: names of non-persistent buffers, which no source has, that were not among ``buffers`` either:
    they hold what was in their memory before, which is anything after ``to_empty``.
    without_state: parameters for which an optimizer's checkpoint has no state, because they never had a gradient.
    discarded: parameters whose gradients the load discarded on this rank, the only field that may differ between ranks:
    those that a step had left unreduced when it raised. ``optimizer.zero_grad()`` does not reach them, and the next
    backward would add to them.
    """

    loaded: int
    checked: int = 0
    missing: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    extra_states: tuple[str, ...] = ()
    buffers_not_given: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
