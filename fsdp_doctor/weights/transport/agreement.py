"""The ranks' agreement, over the store of the process group: what is extracted or loaded, and who has left.

Before its collectives each rank compares its plan with the others'. Then each promises so many buckets at once, twice
as many each time: whatever happens to it, it takes part in their collectives. A rank that leaves says so before the
next of these stages, and the others raise where a collective would have stood still. So the store is asked O(log)
times in the number of buckets. A store, because a group may have NCCL alone, whose collectives cannot be given up once
they are begun.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from fsdp_doctor.text import read_first_line
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.rank_groups import Comparison

_GO, _LEFT, _DIFFERS = "go", "left", "differs"
# With which all go on: to one bucket, to as many as were promised, or to what they compare before.
_ONE, _ALL, _COMPARE = "one", "all", "compare"
# The fields of the number to which every rank of a stage adds, in bits: how many came; after that, at the first stage
# the sum of their plans' numbers and how many have more to compare, at the others how many promised one bucket only.
_RANKS_BITS, _PLAN_BITS = 16, 30
# To have a thread wait costs more than to ask: up to so many ranks ask a few times first, after so many seconds each.
# More of them would be too much work for the store.
_FEW_RANKS = 64
_ASKED_AFTER = (0.0, 50e-6, 100e-6, 200e-6)
# A signal that comes just before a wait begins does not end it.
_SECONDS_OF_A_WAIT = 0.5
_SECONDS_OF_A_WATCH = 0.05


class RankLeft(RuntimeError):
    """Another rank has left, or the store is gone; the message says which, where and why."""


class PlanMismatch(RuntimeError):
    """The ranks do not extract, or load, the same; the message is the first difference."""


@dataclass
class _Keys:
    """Keys in the store.

    read: keys that every rank has read. unread: keys that some ranks may not have read until all reach the next stage.
    """

    read: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


# What the agreements of this process share, by the ranks that take part.
_num_agreements: Counter[tuple[int, ...]] = Counter()
_leftover: dict[tuple[int, ...], _Keys] = {}
_under_way: list[Agreement] = []
_lock = threading.Lock()


def count_agreements() -> int:
    """The number of this process so far. A rank that made fewer takes part in other agreements from then on."""
    return sum(_num_agreements.values())


class ComparedPlan:
    """The lines of a plan, which must be the same on all ranks: an error message shows the first line that differs."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    @functools.cached_property
    def number(self) -> int:
        """Even, of 30 bits; other plans share it by an accident of one in five hundred million."""
        digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % (1 << _PLAN_BITS) & ~1


class Agreement:
    """The agreement over one extraction or loading. ``ranks``: all that take part; each of them must make one.

    speaker: the rank whose message all get at each stage; None without messages. watch: is called while this rank waits
    for others, and returns a sentence about one that will not come, or nothing.
    """

    def __init__(
        self, ranks: tuple[int, ...], verb: Literal["extract", "load", "save"] = "extract", speaker: int | None = None
    ) -> None:
        self._ranks = ranks
        self._verb = verb
        self._speaker = speaker
        self.watch: Callable[[], str] | None = None
        self._stage = 0
        self._buckets = 0
        self._keys = _Keys()
        self._counted: list[str] = []
        self.sums: list[int] = []
        self._interrupt: BaseException | None = None
        self._over = len(ranks) == 1
        if self._over:
            return
        with _lock:
            _num_agreements[ranks] += 1
            self._number = _num_agreements[ranks]
        self._key = f"fsdp_doctor/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}/{self._number}"
        self._rank = dist.get_rank()
        with self._store_is_there():
            self._store = connect(private.find_default_store())

    def expect(self, plan: Callable[[], ComparedPlan], comparison: Comparison | None = None) -> None:
        """Sets the plan that the ranks compare before the first bucket; it is computed while shards are being loaded.

        comparison: further checks, made after the plans turned out to be equal, if any rank still has to make them.
        """
        self._plan = plan
        self._comparison = comparison

    def count(self, what: str, number: int) -> None:
        """Adds to a sum over all ranks, before the first stage; ``sums`` has it after that stage."""
        self._counted.append(f"{self._key}/count/{what}")
        self._store.add(self._counted[-1], number)

    def count_next(self, num_left: int) -> int:
        """Counts the buckets that the next promise may be for: one more than there were, so 1, 2, 4, ..."""
        return num_left if self._over else min(self._buckets + 1, num_left)

    def promise(self, num_buckets: int, *, one_only: bool) -> int:
        """Returns how many buckets every rank has promised to launch, whatever happens to it: all, or 1.

        one_only: this rank promises no more than one. Raises RankLeft, PlanMismatch.
        """
        if self._over:
            return num_buckets
        # Two that are read in turns promise one bucket each: nobody would know the order of what both have promised.
        first = next(filter(self.concerns, _under_way), self)
        with self._store_is_there():
            agreed = self._come_to_stage(one_only or first is not self)
            if agreed == _COMPARE:
                self._compare()
        promised = num_buckets if agreed == _ALL else 1
        self._buckets += promised
        return promised

    def proceed(self, message: str = "") -> str:
        """Returns the speaker's message when every rank has come to this bucket, with the same plan.

        Raises RankLeft, PlanMismatch.
        """
        if self._over:
            return message
        stage = self._make_stage_key()
        with self._store_is_there():
            if self._speaker == self._rank:
                self._store.set(f"{stage}/message", message)
            agreed = self._come_to_stage(one_only=True)
            if self._speaker not in (None, self._rank):
                message = self._store.get(f"{stage}/message").decode()
            self.sums = self.sums or [self._store.add(key, 0) for key in self._counted]
            if agreed == _COMPARE:
                self._compare()
        self._buckets += 1
        return message

    def leave(self, why: str) -> None:
        """Tells the other ranks that this one will not come to the next stage. Without effect after the end."""
        if not self._over:
            # Without a store, or a process group, there is nobody left to tell.
            with contextlib.suppress(RuntimeError, ValueError):
                self._answer_with(self._make_leaving_answer(why))
            self._end()

    @contextlib.contextmanager
    def announce_leaving(self) -> Iterator[None]:
        """Ends the agreement at an error inside, and tells the other ranks."""
        try:
            yield
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def finish(self) -> None:
        """Returns when every rank has had everything. Raises RankLeft where one stopped before that."""
        if not self._over:
            with self._store_is_there():
                self._come_to_stage(one_only=True)
            self._end()

    def end(self) -> None:
        if not self._over:
            self._end()
            self._heed_interrupt()

    def concerns(self, other: Agreement) -> bool:
        return not set(self._ranks).isdisjoint(other._ranks)

    def is_of_another_thread(self) -> bool:
        """Returns whether another thread, still alive, came to the first stage."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    def _begin(self) -> None:
        """Raises RuntimeError where another thread is in an agreement with some of the same ranks.

        Two threads would begin the groups' collectives in another order on each rank.
        """
        self._thread = threading.current_thread()
        with _lock:
            if any(other.concerns(self) and other.is_of_another_thread() for other in _under_way):
                raise RuntimeError(
                    "another thread of this process is extracting or loading over the same ranks, but only one "
                    "thread can do so at a time: end that call first"
                )
            _under_way.append(self)
        self._keys = _leftover.pop(self._ranks, self._keys)

    def _make_leaving_answer(self, why: str) -> str:
        after = f"left after {self._buckets} buckets" if self._buckets else "left before the first bucket"
        return f"{_LEFT}:rank {self._rank} {after if self._verb == 'extract' else 'failed'}: {why}"

    def _heed_interrupt(self) -> None:
        if self._interrupt is not None:
            raise self._interrupt

    def _compare(self) -> None:
        assert self._comparison is not None
        key = f"{self._make_stage_key()}/of"
        self._store.set(f"{key}/{self._rank}", self._comparison.make_statement())
        self._comparison.conclude(self._come_to_stage(True, functools.partial(self._wait_for_conclusion, key)))

    def _wait_for_conclusion(self, key: str) -> str:
        assert self._comparison is not None
        keys = {rank: f"{key}/{rank}" for rank in self._ranks}
        statements = self._store.multi_get(list(keys.values()))
        conclusion = self._comparison.draw_conclusion({r: s.decode() for r, s in zip(keys, statements, strict=True)})
        for each in keys.values():
            self._store.delete_key(each)
        return conclusion

    def _come_to_stage(self, one_only: bool, conclusion: Callable[[], str] | None = None) -> str:
        """Returns the answer of the last rank to come: its conclusion, or whether one promised one bucket only."""
        self._heed_interrupt()
        plan = self._plan() if not self._stage else None
        if plan:
            self._begin()
        is_due = self._comparison is not None and self._comparison.is_due
        added = (plan.number + is_due if plan else int(one_only)) << _RANKS_BITS
        total = self._store.add(f"{self._make_stage_key()}/came", added + 1)
        came, rest = total % 2**_RANKS_BITS, total >> _RANKS_BITS
        if came == 1:
            for key in self._keys.read:
                self._store.delete_key(key)
        if came < len(self._ranks):
            answer = self._await_answer()
        elif plan and not 0 <= rest - plan.number * came <= came:
            answer = self._answer_with(_DIFFERS)
        elif plan:
            answer = self._answer_with(f"{_GO}:{_COMPARE if rest > plan.number * came else _ONE}")
        else:
            answer = self._answer_with(f"{_GO}:{conclusion() if conclusion else _ONE if rest else _ALL}")
        kind, _, sentence = answer.partition(":")
        if kind != _GO:
            if kind == _DIFFERS:
                sentence = self._describe_difference()
            self._end()
            self._heed_interrupt()
            raise (PlanMismatch if kind == _DIFFERS else RankLeft)(sentence)
        # Every rank has read the answer of the stage before, for it has come to this one.
        self._keys = _Keys(self._keys.unread, self._list_keys(self._stage))
        self._stage += 1
        return sentence

    def _describe_difference(self) -> str:
        """The sentence that all ranks get: the first line that differs from the plan that was in the store first."""
        plan = self._plan().lines
        written = "\n".join([str(self._rank), *plan])
        other, *others = self._store.compare_set(f"{self._key}/plan", "", written).decode().split("\n")
        if others == list(plan):
            return self._store.get(f"{self._key}/difference").decode()
        sentence = describe_first_difference(f"rank {other}", others, f"rank {self._rank}", plan, self._verb)
        return self._store.compare_set(f"{self._key}/difference", "", sentence).decode()

    def _await_answer(self) -> str:
        """An interrupt is heeded once the others know, or at the next stage where they have gone on meanwhile."""
        # While one thread waits over the only connection, no other can use it.
        has_one_store = self._store is private.find_default_store()
        try:
            if self.watch is not None:
                return self._await_watchfully(self.watch).decode()
            if has_one_store or self._is_answered_soon():
                return self._wait().decode()
            return call_interruptibly(self._wait).decode()
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            return self._answer_with(f"{_LEFT}:{self._describe_missing_ranks()}")
        except Exception:
            raise
        except BaseException as interrupt:
            self._interrupt = interrupt
            # In place of the connection over which a thread is still waiting.
            _connections.store = None
            self._store = connect(private.find_default_store())
            return self._answer_with(self._make_leaving_answer(type(interrupt).__name__))

    def _await_watchfully(self, watch: Callable[[], str]) -> bytes:
        while True:
            try:
                self._store.wait([self._make_stage_key()], datetime.timedelta(seconds=_SECONDS_OF_A_WATCH))
                return self._wait()
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:
                if sentence := watch():
                    return self._answer_with(f"{_LEFT}:{sentence}").encode()

    def _describe_missing_ranks(self) -> str:
        """A sentence for all: a rank that is not here is behind, or was not meant to come."""
        came = self._store.add(f"{self._make_stage_key()}/came", 0) % 2**_RANKS_BITS
        call = f"call {self._number} over ranks {list(self._ranks)}"
        where = f"bucket {self._buckets} of {call} in time" if self._stage else f"{call} in time"
        verb = "iterate" if self._verb == "extract" else self._verb
        made = "" if self._stage else f", and the other ranks have come to {self._number - 1} at most"
        return (
            f"only {came} of {len(self._ranks)} ranks came to {where}{made}: each rank must {verb} as often as the "
            "others, with a model that is sharded over all of them"
        )

    def _is_answered_soon(self) -> bool:
        if len(self._ranks) > _FEW_RANKS:
            return False
        for seconds in _ASKED_AFTER:
            time.sleep(seconds)
            if self._store.check([self._make_stage_key()]):
                return True
        return False

    def _wait(self) -> bytes:
        return self._store.get(self._make_stage_key())

    @contextlib.contextmanager
    def _store_is_there(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            self._end()
            raise RankLeft(
                (self.watch() if self.watch is not None else "")
                or "the process with the process group's store has ended, or cannot be reached: "
                f"{read_first_line(error)}"
            ) from error

    def _answer_with(self, answer: str) -> str:
        """Gives a stage its answer, and returns it: this answer, or an earlier one of another rank. A stage has one
        answer.
        """
        return self._store.compare_set(self._make_stage_key(), "", answer).decode()

    def _make_stage_key(self) -> str:
        return f"{self._key}/{self._stage}"

    def _list_keys(self, stage: int) -> list[str]:
        key = f"{self._key}/{stage}"
        message = [f"{key}/message"] if self._speaker is not None else []
        return [*([] if stage else self._counted), *message, f"{key}/came", key]

    def _end(self) -> None:
        """Leaves the deleting of what is in the store to the ranks' next agreement."""
        self._over = True
        with _lock:
            if self in _under_way:
                _under_way.remove(self)
        keys = self._keys if self._stage else _leftover.get(self._ranks, self._keys)
        # A rank may leave before the next stage, and one that differs says how.
        difference = [f"{self._key}/plan", f"{self._key}/difference"] if not self._stage else []
        keys.unread += [*difference, *self._list_keys(self._stage)]
        _leftover[self._ranks] = keys


def describe_first_difference(name: str, plan: Sequence[str], other_name: str, others: Sequence[str], verb: str) -> str:
    """A sentence about the first line that two plans do not share."""
    for index in range(max(len(plan), len(others))):
        left = plan[index] if index < len(plan) else "nothing more"
        right = others[index] if index < len(others) else "nothing more"
        if left != right:
            return f"the ranks do not {verb} the same: {name} has {left}, {other_name} has {right}"
    return f"{name} and {other_name} agree"


_connections = threading.local()


def connect(store: dist.Store) -> dist.Store:
    """Returns this thread's connection: while one waits, other threads, torch's too, must be able to use theirs.

    Not every kind of store can be cloned, and before torch 2.7 none can: then it is the store itself.
    """
    if getattr(_connections, "store", None) is not store:
        # One that is gone would be waited for.
        store.check(["fsdp_doctor"])
        try:
            _connections.clone = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            _connections.clone = store
        _connections.store = store
    clone: dist.Store = _connections.clone
    return clone


def call_interruptibly(wait: Callable[[], bytes]) -> bytes:
    """Calls what waits in C++ so that Ctrl-C ends it: Python's handlers of signals run in the main thread alone.

    From the main thread another one calls it, and goes on if this is interrupted. Where no thread is to be had, it is
    called here.
    """
    if threading.current_thread() is not threading.main_thread():
        return wait()
    result: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            result.put((wait(), None))
        except BaseException as error:
            result.put((None, error))

    waiting = threading.Thread(target=call, daemon=True)
    try:
        waiting.start()
    except RuntimeError:
        return wait()
    while True:
        with contextlib.suppress(queue.Empty):
            answer, error = result.get(timeout=_SECONDS_OF_A_WAIT)
            break
    waiting.join()
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
