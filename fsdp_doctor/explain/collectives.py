"""Where each rank stood when a job hung: the collective that it waited in, and a sentence on where the ranks part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_PLACES = 4


@dataclass(kw_only=True)
class Waiting:
    """One rank in a collective that did not end.

    group: the process group's name. op: ALLGATHER and so on, empty where it is not said. number: the collective's in
    its group. sent, received: sizes, in elements or as shapes. enqueued, completed: the last numbers that this rank has
    launched and finished. entered: whether it came to the collective that the others wait in. frames: who called it,
    innermost first.
    """

    rank: int
    group: str = ""
    op: str = ""
    number: int | None = None
    sent: str = ""
    received: str = ""
    waited_s: float | None = None
    enqueued: int | None = None
    completed: int | None = None
    entered: bool = True
    frames: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """``ALLGATHER 126``, as far as it is known."""
        number = self.number if self.number is not None else "" if self.completed is None else self.completed + 1
        return f"{self.op or 'collective'} {number}".strip()

    @property
    def sizes(self) -> tuple[str, str]:
        return self.sent, self.received

    @property
    def group_size(self) -> int | None:
        """How many ranks gather or scatter together, by the sizes; None where they do not say."""
        if not (self.sent.isdigit() and self.received.isdigit() and self.op in ("ALLGATHER", "REDUCE_SCATTER")):
            return None
        small, large = sorted((int(self.sent), int(self.received)))
        return large // small if small and large % small == 0 else None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """What is known of a hang.

    waiting: by rank. parting: sentences. differs: whether the ranks are in different places.
    """

    waiting: tuple[Waiting, ...]
    parting: tuple[str, ...]
    differs: bool


def hang_of(waiting: Iterable[Waiting], said: Sequence[str] = ()) -> Hang | None:
    """Of the ranks that are known to wait; ``said``: what an analysis in the log has found already."""
    ranks = sorted(waiting, key=lambda one: (one.group, one.rank))
    if not ranks and not said:
        return None
    sentences, differs = _parting(ranks) if ranks else ([], True)
    return Hang(waiting=tuple(ranks), parting=(*said, *sentences), differs=differs or bool(said))


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3 and 5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = len(words) - 2 * _MOST_PLACES
    if more > 0:
        words = [*words[: 2 * _MOST_PLACES], f"{more} more"]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if one else 's'} {' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def _parting(waiting: list[Waiting]) -> tuple[list[str], bool]:
    late = [one for one in waiting if not one.entered]
    inside = [one for one in waiting if one.entered]
    places: dict[str, list[Waiting]] = {}
    for one in inside:
        places.setdefault(one.call, []).append(one)
    if late and inside:
        return [f"{_stand(places)}; {_late(late)}."], True
    if len(places) > 1:
        return [f"{_stand(places)}{_behind(inside)}."], True
    sizes: dict[tuple[str, str], list[Waiting]] = {}
    for one in waiting:
        sizes.setdefault(one.sizes, []).append(one)
    call = waiting[0].call
    if len(sizes) > 1:
        shares = [
            f"{named(one.rank for one in ones)} with {sent or '?'} in and {received or '?'} out"
            for (sent, received), ones in list(sizes.items())[:_MOST_PLACES]
        ]
        return [f"The ranks are in the same collective, {call}, with different sizes: {', '.join(shares)}."], True
    return [_together(waiting, call)], False


def _stand(places: dict[str, list[Waiting]]) -> str:
    shown = [
        f"{named(one.rank for one in ones)} {_is(ones)} in {call}" for call, ones in list(places.items())[:_MOST_PLACES]
    ]
    more = f", the others in {len(places) - _MOST_PLACES} more places" if len(places) > _MOST_PLACES else ""
    stand = ", ".join(shown) + more
    return stand[0].upper() + stand[1:]


def _late(late: list[Waiting]) -> str:
    whose = "its" if len(late) == 1 else "their"
    return f"{named(one.rank for one in late)} never came there, the last of {whose} calls being {late[0].call}"


def _behind(waiting: list[Waiting]) -> str:
    """Which ranks are behind, where all are numbered in one group."""
    numbers = [one.number for one in waiting if one.number is not None]
    if len(numbers) < len(waiting) or len({one.group for one in waiting}) > 1 or min(numbers) == max(numbers):
        return ""
    behind = [one for one in waiting if one.number == min(numbers)]
    return f": {named(one.rank for one in behind)} {_is(behind)} {max(numbers) - min(numbers)} behind"


def _together(waiting: list[Waiting], call: str) -> str:
    ranks = {one.rank for one in waiting}
    size = waiting[0].group_size
    everyone = set(range(size or max(ranks) + 1))
    here = named(ranks)
    here = here[0].upper() + here[1:]
    verb = "waits" if len(ranks) == 1 else "wait"
    of = f" of a group of {size}" if size else ""
    if missing := everyone - ranks:
        return (
            f"{here}{of} {verb} in {call}, and of {named(missing)} the log says nothing: a rank that did not come "
            "there is among them."
        )
    if len(ranks) == 1 and not size:
        return f"{here} waits in {call}, and of the other ranks the log says nothing: one of them did not come there."
    stalled = "they do not part there, so look at the network and the devices"
    return f"{here}{of} {verb} in {call} with the same sizes: {stalled}."


def _is(ones: list[Waiting]) -> str:
    return "is" if len({one.rank for one in ones}) == 1 else "are"
