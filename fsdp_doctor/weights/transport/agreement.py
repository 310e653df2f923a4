"""Agreement of the ranks, over the process group's store, about the extracted or loaded tensors, and about ranks that
leave.

Before the first collective each rank compares its plan with the others'. After that, each rank promises to take part in
the collectives of a number of buckets, even if it fails before they begin. Each promise covers twice as many buckets as
the one before. A rank that leaves announces this before the next promise, so that the other ranks raise instead of
waiting in a collective. For n buckets, the store is used O(log n) times. A store is used because a group may have only
NCCL, whose collectives cannot be cancelled once they are launched.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from fsdp_doctor.text import format_count, join_some, read_first_line
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.rank_groups import Comparison

_GO, _LEFT, _DIFFERS = "go", "left", "differs"
# Answers with which all ranks continue: with one bucket, with all promised buckets, or with a further comparison.
_ONE, _ALL, _COMPARE = "one", "all", "compare"
# Fields, in bits, of the number to which every rank of a stage adds. The first counts the ranks that came. The second
# is, at the first stage, the sum of their plans' numbers plus the number of ranks that have more to compare; at later
# stages, the number of ranks that promised only one bucket.
_RANKS_BITS, _PLAN_BITS = 16, 30
# A wait in another thread costs more than a query. Up to this many ranks first query a few times, after these numbers
# of seconds; queries of more ranks would be too much work for the store.
_FEW_RANKS = 64
_ASKED_AFTER = (0.0, 50e-6, 100e-6, 200e-6)
# A signal that comes just before a wait begins does not end it.
_SECONDS_OF_A_WAIT = 0.5
_SECONDS_OF_A_WATCH = 0.05
# After how long a wait a rank notes in the store that it waits, and after how long it warns about the missing ranks.
_SECONDS_BEFORE_NOTE, _SECONDS_BEFORE_WARNING = 5.0, 30.0


class RankLeft(RuntimeError):
    """Error that a rank raises if another rank has left or the store is gone; the message says which rank, where and
    why.
    """


class PlanMismatch(RuntimeError):
    """Error for ranks that do not extract, or load, the same tensors; the message gives the first difference."""


@dataclass
class _Keys:
    """Keys in the store.

    read: keys that every rank has read.
    unread: keys that some ranks may not have read until all reach the next stage.
    """

    read: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


# State that the agreements of this process share, by the ranks that take part.
_num_agreements: Counter[tuple[int, ...]] = Counter()
_leftover: dict[tuple[int, ...], _Keys] = {}
_under_way: list[Agreement] = []
_lock = threading.Lock()


def count_agreements() -> int:
    """Returns the number of agreements of this process.

    Ranks that agree with each other must have made the same number of agreements.
    """
    return sum(_num_agreements.values())


class ComparedPlan:
    """Lines of a plan, which must be the same on all ranks; an error message shows the first line that differs."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    @functools.cached_property
    def number(self) -> int:
        """Even number of 30 bits, computed from the lines.

        Two different plans have the same number with a probability of one in 500 million.
        """
        digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % (1 << _PLAN_BITS) & ~1


class Agreement:
    """Agreement over one extraction, load or save. At each stage, the ranks wait for each other.

    ranks: all ranks that take part; each of these ranks must make an object of this class.
    speaker: the rank whose message all ranks get at each stage; None if there are no messages.
    watch: a function that is called while this rank waits for others; it returns a sentence about a rank that will not
        come, or an empty text.
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
        self._has_noted = self._has_warned = False
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
        """Sets the plan that the ranks compare before the first bucket. The plan is computed while shards are being
        loaded.

        comparison: further checks. They are made once the plans are known to be equal, unless all ranks have made them
            before.
        """
        self._plan = plan
        self._comparison = comparison

    def count(self, what: str, number: int) -> None:
        """Adds ``number`` to the sum ``what`` over all ranks. Call it before the first stage; after that stage,
        ``sums`` has the result.
        """
        self._counted.append(f"{self._key}/count/{what}")
        self._store.add(self._counted[-1], number)

    def count_next(self, num_left: int) -> int:
        """Returns the number of buckets that the next promise may cover: 1, 2, 4, ..., at most ``num_left``."""
        return num_left if self._over else min(self._buckets + 1, num_left)

    def promise(self, num_buckets: int, *, one_only: bool) -> int:
        """Returns the number of buckets that every rank has promised to launch in any case: ``num_buckets`` or 1.

        Raises RankLeft if another rank has left, and PlanMismatch if the ranks' plans differ.

        one_only: whether this rank promises only one bucket.
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
        """Waits until every rank has reached this stage with the same plan; returns the message of the ``speaker``.

        Raises RankLeft if another rank has left, and PlanMismatch if the ranks' plans differ.
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
        """Tells the other ranks that this rank will not come to the next stage. Has no effect after the end."""
        if not self._over:
            # Without a store, or a process group, there is nobody left to tell.
            with contextlib.suppress(RuntimeError, ValueError):
                self._answer_with(self._make_leaving_answer(why))
            self._end()

    @contextlib.contextmanager
    def announce_leaving(self) -> Iterator[None]:
        """Tells the other ranks about an error in the block, and ends the agreement."""
        try:
            yield
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def finish(self) -> None:
        """Waits until every rank has all its results. Raises RankLeft if a rank stopped before."""
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
        """Returns whether the agreement began in another thread that is still alive."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    def _begin(self) -> None:
        """Registers the agreement.

        Raises RuntimeError if another thread is in an agreement with some of the same ranks. With two threads, the
        order in which the groups' collectives are launched could differ between ranks.
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
        count = format_count(self._buckets, "bucket")
        after = f"left after {count}" if self._buckets else "left before the first bucket"
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
        """Waits for all ranks at the next stage, and returns the answer of the last rank to come.

        The answer is the result of ``conclusion``, if this is given. Otherwise it says how the ranks continue: with one
        bucket, with all promised buckets, or with a comparison.
        """
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
        """Returns a sentence that is the same on all ranks: the first difference from the plan that was stored
        first.
        """
        plan = self._plan().lines
        written = "\n".join([str(self._rank), *plan])
        other, *others = self._store.compare_set(f"{self._key}/plan", "", written).decode().split("\n")
        if others == list(plan):
            return self._store.get(f"{self._key}/difference").decode()
        sentence = describe_first_difference(f"rank {other}", others, f"rank {self._rank}", plan, self._verb)
        return self._store.compare_set(f"{self._key}/difference", "", sentence).decode()

    def _await_answer(self) -> str:
        """Waits for the stage's answer.

        An interrupt during the wait is raised after the other ranks were informed, or at the next stage if they have
        already continued.
        """
        # While one thread waits over the only connection, no other can use it.
        has_one_store = self._store is private.find_default_store()
        try:
            if self.watch is not None:
                return self._await_watchfully(self.watch).decode()
            if has_one_store or self._is_answered_soon():
                return self._wait().decode()
            return call_interruptibly(self._wait, self._note_wait).decode()
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
        finally:
            if self._has_noted:
                self._has_noted = False
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(self._make_waiting_key(self._rank))

    def _note_wait(self, seconds: float) -> None:
        """Notes in the store that this rank waits, and warns once about ranks that do not come to a call.

        Opens another connection to the store, because the wait occupies this thread's connection.
        """
        is_to_be_noted = seconds >= _SECONDS_BEFORE_NOTE and not self._has_noted
        is_to_be_warned = seconds >= _SECONDS_BEFORE_WARNING and not self._stage and not self._has_warned
        if not (is_to_be_noted or is_to_be_warned):
            return
        with contextlib.suppress(RuntimeError):
            store: dist.Store = private.find_default_store().clone()  # type: ignore[attr-defined]
            self._has_noted = True
            store.set(self._make_waiting_key(self._rank), "")
            if is_to_be_warned:
                self._has_warned = True
                waiting = self._list_waiting_ranks(store)
                if waiting[0] == self._rank and not store.check([self._make_stage_key()]):
                    who = self._name_missing_ranks(store, waiting) or "other ranks"
                    sys.stderr.write(
                        f"fsdp-doctor: rank {self._rank} has waited {seconds:.0f} s for {who} to come to "
                        f"{self._name_call()}, and still waits: every rank must make the call\n"
                    )
                    sys.stderr.flush()

    def _make_waiting_key(self, rank: int) -> str:
        return f"{self._make_stage_key()}/waits/{rank}"

    def _list_waiting_ranks(self, store: dist.Store) -> list[int]:
        """Lists this rank and the other ranks that have noted that they wait."""
        return [rank for rank in self._ranks if rank == self._rank or store.check([self._make_waiting_key(rank)])]

    def _name_missing_ranks(self, store: dist.Store, waiting: Sequence[int]) -> str:
        """Names the ranks that have not come to the stage; empty unless each rank that has come has noted that it
        waits.
        """
        came = store.add(f"{self._make_stage_key()}/came", 0) % 2**_RANKS_BITS
        missing = [rank for rank in self._ranks if rank not in waiting]
        if came != len(waiting) or not missing:
            return ""
        return f"rank {missing[0]}" if len(missing) == 1 else f"ranks {join_some(list(map(str, missing)))}"

    def _name_call(self) -> str:
        return f"call {self._number} over ranks {list(self._ranks)}"

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
        """Describes in one sentence that ranks are missing at a stage, because they are late or were not meant
        to come.
        """
        came = self._store.add(f"{self._make_stage_key()}/came", 0) % 2**_RANKS_BITS
        where = f"bucket {self._buckets} of {self._name_call()}" if self._stage else self._name_call()
        who = self._name_missing_ranks(self._store, self._list_waiting_ranks(self._store))
        absent = f" ({who} did not)" if who else ""
        made = "" if self._stage else f", and the other ranks have come to {self._number - 1} at most"
        advice = "make the call, and iterate to its end," if self._verb == "extract" else "make the call"
        return (
            f"only {came} of {len(self._ranks)} ranks came to {where} in time{absent}{made}: {advice} on every rank, "
            "as often on each, with a model that is sharded over all of them"
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
        """Gives a stage its answer, unless another rank has already done so. Returns the stage's answer."""
        return self._store.compare_set(self._make_stage_key(), "", answer).decode()

    def _make_stage_key(self) -> str:
        return f"{self._key}/{self._stage}"

    def _list_keys(self, stage: int) -> list[str]:
        key = f"{self._key}/{stage}"
        message = [f"{key}/message"] if self._speaker is not None else []
        return [*([] if stage else self._counted), *message, f"{key}/came", key]

    def _end(self) -> None:
        """Ends the agreement. Its keys in the store are deleted in the ranks' next agreement."""
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
    """Describes in one sentence the first line in which two plans differ."""
    for index in range(max(len(plan), len(others))):
        left = plan[index] if index < len(plan) else "nothing more"
        right = others[index] if index < len(others) else "nothing more"
        if left != right:
            return f"the ranks do not {verb} the same: {name} has {left}, {other_name} has {right}"
    return f"{name} and {other_name} agree"


_connections = threading.local()


def connect(store: dist.Store) -> dist.Store:
    """Returns a connection of this thread to the store, so that a waiting thread does not block other threads.

    torch has threads that use the store, too. Some kinds of stores cannot be cloned, and before torch 2.7 none can; in
    these cases the store itself is returned.
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


def call_interruptibly(wait: Callable[[], bytes], note: Callable[[float], object]) -> bytes:
    """Calls a C++ function that waits, so that Ctrl-C interrupts it.

    Python runs signal handlers only in the main thread. In the main thread, the function is therefore called in another
    thread, which continues after an interrupt. If no thread can be started, the function is called directly.

    note: a function that is called now and then during the wait, with the number of seconds since its beginning.
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
    begin = time.monotonic()
    while True:
        try:
            answer, error = result.get(timeout=_SECONDS_OF_A_WAIT)
            break
        except queue.Empty:
            note(time.monotonic() - begin)
    waiting.join()
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
