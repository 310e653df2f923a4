"""The ranks' agreement, over the store of the process group: what is extracted or loaded, and who has left.

Before its first collective each rank compares its plan with the others'; before each bucket it says
that it will take part. A rank that leaves says so instead, and the others raise where a collective
would have stood still. A store, because a group may have NCCL alone, whose collectives cannot be
given up once they are begun.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch.distributed as dist

from fsdp_doctor.fsdp import private

_GO, _LEFT, _DIFFERS = "go", "left", "differs"
_num_agreements: collections.Counter[tuple[int, ...]] = collections.Counter()
_leftover: dict[tuple[int, ...], list[str]] = {}


class RankLeft(RuntimeError):
    """Another rank has left; the message says which, where and why."""


class PlanMismatch(RuntimeError):
    """The ranks do not extract, or load, the same; the message is the first difference."""


class Agreement:
    """The agreement over one extraction or loading. ``ranks``: all that take part; each of them must make one.

    Each bucket is one stage, and the plan is compared in the first. Keys of a stage are deleted in the next.
    speaker: the rank whose word all get at each stage; None where nobody has anything to say.
    """

    def __init__(
        self, ranks: tuple[int, ...], verb: Literal["extract", "load"] = "extract", speaker: int | None = None
    ) -> None:
        self._ranks = ranks
        self._verb = verb
        self._speaker = speaker
        self._stage = 0
        self._counted: list[str] = []
        self._over = len(ranks) == 1
        if self._over:
            return
        self._store = _connection(private.default_store())
        of_ranks = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        _num_agreements[ranks] += 1
        self._key = f"fsdp_doctor/{of_ranks}/{_num_agreements[ranks]}"

    def expect(self, plan: Callable[[], Sequence[str]]) -> None:
        """The plan to compare before the first bucket: made then, while shards are being loaded."""
        self._plan = plan

    def count(self, what: str, own: int) -> None:
        """Before the first stage: adds to what all ranks together have of it."""
        self._counted.append(f"{self._key}/count/{what}")
        self._store.add(self._counted[-1], own)

    def counted(self) -> list[int]:
        """After the first stage: the sums, in the order in which they were begun."""
        return [self._store.add(key, 0) for key in self._counted]

    def proceed(self, word: str = "") -> str:
        """Returns the speaker's word when every rank has come to this bucket, with the same plan.

        Raises RankLeft, PlanMismatch.
        """
        if self._over:
            return word
        stage = self._stage_key()
        if self._speaker == dist.get_rank():
            self._store.set(f"{stage}/word", word)
        if not self._stage:
            self._compare()
        came = self._store.add(f"{stage}/came", 1)
        answer = self._answer_with(_GO) if came == len(self._ranks) else self._awaited_answer()
        if answer != _GO:
            self._end()
            kind, _, sentence = answer.partition(":")
            raise (PlanMismatch if kind == _DIFFERS else RankLeft)(sentence)
        if self._speaker not in (None, dist.get_rank()):
            word = self._store.get(f"{stage}/word").decode()
        if came == len(self._ranks):
            self._forget()
        self._stage += 1
        return word

    def leave(self, why: str) -> None:
        """Tells the others that this rank will not come to the next stage. Without effect at the end."""
        if not self._over:
            # Without a store, or a process group, there is nobody left to tell.
            with contextlib.suppress(RuntimeError, ValueError):
                self._answer_with(f"{_LEFT}:rank {dist.get_rank()} {self._left()}: {why}")
            self._end()

    def _left(self) -> str:
        if self._verb == "load":
            return "failed"
        return f"left after {self._stage} buckets" if self._stage else "left before the first bucket"

    def end(self) -> None:
        """There is no further stage."""
        if not self._over:
            self._stage -= 1
            self._end()

    def _compare(self) -> None:
        """Raises PlanMismatch, with the sentence that all ranks get, where the first to come has another plan."""
        plan = self._plan()
        digest = hashlib.blake2b("\n".join(plan).encode(), digest_size=16).hexdigest()
        if self._store.add(f"{self._key}/first", 1) == 1:
            self._store.set(f"{self._key}/plan", "\n".join([str(dist.get_rank()), *plan]))
            self._store.set(f"{self._key}/digest", digest)
            return
        if self._store.get(f"{self._key}/digest").decode() == digest:
            return
        other, *others = self._store.get(f"{self._key}/plan").decode().split("\n")
        sentence = first_difference(f"rank {other}", others, f"rank {dist.get_rank()}", plan, self._verb)
        answer = self._answer_with(f"{_DIFFERS}:{sentence}")
        self._end()
        kind, _, sentence = answer.partition(":")
        raise (PlanMismatch if kind == _DIFFERS else RankLeft)(sentence)

    def _awaited_answer(self) -> str:
        try:
            return self._store.get(self._stage_key()).decode()
        except dist.DistStoreError:
            came = self._store.add(f"{self._stage_key()}/came", 0)
            return self._answer_with(
                f"{_LEFT}:only {came} of {len(self._ranks)} ranks came to bucket {self._stage} in time; "
                f"each of ranks {list(self._ranks)} must {'iterate' if self._verb == 'extract' else 'load'}"
            )

    def _answer_with(self, answer: str) -> str:
        """The stage's answer: this one, or the one that another rank gave before. A stage has one answer."""
        return self._store.compare_set(self._stage_key(), "", answer).decode()

    def _stage_key(self) -> str:
        return f"{self._key}/{self._stage}"

    def _keys(self, stage: int) -> list[str]:
        key = f"{self._key}/{stage}"
        plan = [f"{self._key}/{name}" for name in ("first", "plan", "digest")] if not stage else []
        word = [f"{key}/word"] if self._speaker is not None else []
        return [key, f"{key}/came", *word, *plan, *(self._counted if not stage else [])]

    def _forget(self) -> None:
        """Every rank has read the answer of the stage before, for it has come to this one."""
        done = self._keys(self._stage - 1) if self._stage else _leftover.pop(self._ranks, [])
        for key in done:
            self._store.delete_key(key)

    def _end(self) -> None:
        """What is left in the store goes with the first stage of the ranks' next agreement."""
        self._over = True
        # Nobody forgets the stage before one to which not all have come.
        stages = range(max(self._stage - 1, 0), self._stage + 1)
        _leftover[self._ranks] = [key for stage in stages for key in self._keys(stage)]


def first_difference(one: str, plan: Sequence[str], other: str, others: Sequence[str], verb: str) -> str:
    """A sentence about the first line that two plans do not share."""
    for index in range(max(len(plan), len(others))):
        left = plan[index] if index < len(plan) else "nothing more"
        right = others[index] if index < len(others) else "nothing more"
        if left != right:
            return f"the ranks do not {verb} the same: {one} has {left}, {other} has {right}"
    return f"{one} and {other} agree"


@functools.lru_cache(maxsize=1)
def _connection(store: dist.Store) -> dist.Store:
    """A connection of our own: while one waits, torch's own threads must be able to use theirs.

    Not every kind of store can be cloned, and before torch 2.7 none can.
    """
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return store
    return clone
