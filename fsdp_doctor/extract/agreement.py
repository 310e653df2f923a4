"""The ranks' agreement, over the store of the process group: what is gathered, and who has left.

Before its first collective each rank compares its plan with the others'; before each bucket it says
that it will take part. A rank that leaves says so instead, and the others raise where a collective
would have stood still. A store, because a group may have NCCL alone, whose collectives cannot be
given up once they are begun.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from fsdp_doctor.fsdp import private

_GO, _LEFT = "go", "left:"
_num_extractions: collections.Counter[tuple[int, ...]] = collections.Counter()
_leftover: dict[tuple[int, ...], str] = {}


class RankLeft(RuntimeError):
    """Another rank has left the extraction; the message says which, where and why."""


class PlanMismatch(RuntimeError):
    """The ranks do not extract the same; the message is the first difference."""


class Agreement:
    """One extraction's. ``ranks``: all that take part; each of them must make one.

    A stage is a bucket; the plan is compared in the first. Keys of a stage are deleted in the next.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._stage = 0
        self._over = len(ranks) == 1
        if self._over:
            return
        self._store = _connection(private.default_store())
        team = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        _num_extractions[ranks] += 1
        self._key = f"fsdp_doctor/{team}/{_num_extractions[ranks]}"

    def expect(self, plan: Callable[[], Sequence[str]]) -> None:
        """The plan to compare before the first bucket: made then, while shards are being loaded."""
        self._plan = plan

    def _settle(self) -> None:
        """All ranks return, or all raise PlanMismatch with the same sentence; RankLeft where one is gone."""
        plan = self._plan()
        digest = hashlib.blake2b("\n".join(plan).encode(), digest_size=16).hexdigest()
        if self._store.add(f"{self._key}/first", 1) == 1:
            self._store.set(f"{self._key}/plan", "\n".join([str(dist.get_rank()), *plan]))
            self._store.set(f"{self._key}/digest", digest)
        elif self._store.get(f"{self._key}/digest").decode() != digest:
            self._disagree(plan)

    def proceed(self) -> None:
        """Returns when every rank has come to this bucket, with the same plan. Raises RankLeft, PlanMismatch."""
        if self._over:
            return
        if not self._stage:
            self._settle()
        stage = f"{self._key}/{self._stage}"
        self._stage += 1
        came = self._store.add(f"{stage}/came", 1)
        if came == len(self._ranks):
            self._store.set(stage, _GO)
            self._forget(self._stage - 2)
            return
        answer = self._answer(stage, came)
        if answer != _GO:
            self._over = True
            kind, _, sentence = answer.partition(":")
            raise (PlanMismatch if kind == "differs" else RankLeft)(sentence)

    def leave(self, why: str) -> None:
        """Says to the others that this rank will not come to the next stage. Without effect at the end."""
        if not self._over:
            self._over = True
            where = f"after {self._stage} buckets" if self._stage else "before the first bucket"
            self._store.set(f"{self._key}/{self._stage}", _LEFT + f"rank {dist.get_rank()} left {where}: {why}")

    def end(self) -> None:
        """There is no further stage. What is left in the store goes with the next extraction's first."""
        if not self._over and self._stage:
            _leftover[self._ranks] = f"{self._key}/{self._stage - 1}"
        self._over = True

    def _disagree(self, plan: Sequence[str]) -> None:
        other, *others = self._store.get(f"{self._key}/plan").decode().split("\n")
        sentence = first_difference(f"rank {other}", others, f"rank {dist.get_rank()}", plan)
        self._over = True
        self._store.set(f"{self._key}/0", "differs:" + sentence)
        raise PlanMismatch(sentence)

    def _answer(self, stage: str, came: int) -> str:
        try:
            return self._store.get(stage).decode()
        except dist.DistStoreError:
            self._over = True
            came = self._store.add(f"{stage}/came", 0)
            raise RankLeft(
                f"only {came} of {len(self._ranks)} ranks came to bucket {self._stage - 1} "
                f"in time; each of ranks {list(self._ranks)} must iterate"
            ) from None

    def _forget(self, stage: int) -> None:
        """Every rank has read that stage's answer, for it has come to the next."""
        if stage == 0:
            for name in ("first", "plan", "digest"):
                self._store.delete_key(f"{self._key}/{name}")
        key = f"{self._key}/{stage}" if stage >= 0 else _leftover.pop(self._ranks, None)
        if key is not None:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/came")


def first_difference(one: str, plan: Sequence[str], other: str, others: Sequence[str]) -> str:
    """A sentence about the first line that two plans do not share."""
    for index in range(max(len(plan), len(others))):
        left = plan[index] if index < len(plan) else "nothing more"
        right = others[index] if index < len(others) else "nothing more"
        if left != right:
            return f"the ranks do not extract the same: {one} has {left}, {other} has {right}"
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
