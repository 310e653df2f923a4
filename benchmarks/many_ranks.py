"""What the ranks' agreement costs with a thousand ranks: clients of one real TCPStore, without a GPU or a model.

python benchmarks/many_ranks.py [--ranks 1024] [--buckets 30]

Each rank is a connection and a thread of its own; eight processes share the ranks, and the server has one. Beside
fsdp_doctor's agreement, which a call asks for windows of buckets that double, runs a model of what it did before: a
conversation for each bucket. Between two buckets nothing is gathered, so that the store is all that is measured.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier

import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from fsdp_doctor.extract.agreement import Agreement, ComparedPlan, Participant

NUM_PROCESSES = 8
_PATIENCE = datetime.timedelta(seconds=300)
NAMES = [f"model.layers.{index}.weight" for index in range(400)]
PLAN = ComparedPlan([f"{name}: [4096, 4096] torch.bfloat16 in 1024 shards of 16384" for name in NAMES])


class SimulatedRank(Participant):
    """One of many in a process. requests: how many it sent."""

    def __init__(self, rank: int, port: int) -> None:
        super().__init__()
        self._rank = rank
        self._store = _Counting(dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=_PATIENCE))

    def rank(self) -> int:
        return self._rank

    def store(self) -> dist.Store:
        return self._store  # type: ignore[return-value]

    def has_one_store(self) -> bool:
        return True


class _Counting:
    """The store, and how many requests were sent to it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.requests += 1
        method: Callable[..., object] = getattr(self._store, name)
        return method


def in_windows(me: SimulatedRank, num_ranks: int, num_buckets: int, call: int) -> None:
    """As a call of full_tensors does."""
    agreement = Agreement(tuple(range(num_ranks)), process=me)
    agreement.expect(lambda: PLAN)
    launched = 0
    while launched < num_buckets:
        launched += agreement.promise(agreement.num_next(num_buckets - launched), one_only=False)
    agreement.finish()


def one_by_one(me: SimulatedRank, num_ranks: int, num_buckets: int, call: int) -> None:
    """As a call did before: each rank says that it has come to each bucket, and waits until all have."""
    store = me.store()
    for stage in range(num_buckets):
        key = f"before/{call}/{stage}"
        if not stage:
            if store.add(f"{key}/first", 1) == 1:
                store.set(f"{key}/plan", "\n".join(PLAN.lines))
                store.set(f"{key}/digest", "digest")
            else:
                store.get(f"{key}/digest")
        if store.add(f"{key}/came", 1) == num_ranks:
            store.compare_set(key, "", "go")
            if stage:
                store.delete_key(f"before/{call}/{stage - 1}")
                store.delete_key(f"before/{call}/{stage - 1}/came")
        else:
            store.get(key)


WAYS = {"one by one": one_by_one, "in windows": in_windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--buckets", type=int, nargs="+", default=[30])
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, action="append")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    port_of_server: multiprocessing.Queue[int] = context.Queue()
    server = context.Process(target=serve, args=(port_of_server,), daemon=True)
    server.start()
    port = port_of_server.get()
    barrier = context.Barrier(NUM_PROCESSES + 1)
    results: multiprocessing.Queue[tuple[list[float], int]] = context.Queue()
    jobs = [
        context.Process(target=simulate, args=(index, port, options, barrier, results), daemon=True)
        for index in range(NUM_PROCESSES)
    ]
    for job in jobs:
        job.start()
    barrier.wait()
    print(f"{options.ranks} ranks, {NUM_PROCESSES} processes of them; medians of {options.calls} calls")
    for num_buckets in options.buckets:
        for way in options.way or WAYS:
            found = [results.get() for _ in jobs]
            seconds = statistics.median(max(times) for times in zip(*(times for times, _ in found), strict=True))
            requests = sum(count for _, count in found) / options.calls
            print(
                f"{num_buckets:6} buckets, {way:11} {seconds:8.3f} s a call   {requests:10.0f} requests a call   "
                f"{requests / options.ranks:7.1f} of each rank   {requests / seconds:8.0f} requests a second",
                flush=True,
            )
            barrier.wait()
    for job in jobs:
        job.join()


def serve(port: multiprocessing.Queue[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    threading.Event().wait()


def simulate(
    index: int,
    port: int,
    options: argparse.Namespace,
    barrier: Barrier,
    results: multiprocessing.Queue[tuple[list[float], int]],
) -> None:
    """One process: its share of the ranks, each a thread, through every call of every way."""
    mine = range(index, options.ranks, NUM_PROCESSES)
    # At once, since some connections wait for a name server.
    with ThreadPoolExecutor(len(mine)) as pool:
        ranks = list(pool.map(lambda rank: SimulatedRank(rank, port), mine))
    barrier.wait()
    for num_buckets in options.buckets:
        for way in options.way or WAYS:
            before = sum(rank.store().requests for rank in ranks)  # type: ignore[attr-defined]
            times: list[list[float]] = [[] for _ in ranks]
            threads = [
                threading.Thread(target=calls, args=(WAYS[way], rank, options, num_buckets, own))
                for rank, own in zip(ranks, times, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            requests = sum(rank.store().requests for rank in ranks) - before  # type: ignore[attr-defined]
            results.put(([max(call) for call in zip(*times, strict=True)], requests))
            barrier.wait()


def calls(
    way: Callable[[SimulatedRank, int, int, int], None],
    rank: SimulatedRank,
    options: argparse.Namespace,
    num_buckets: int,
    times: list[float],
) -> None:
    store = rank.store()
    for call in range(options.calls):
        # All begin together, which is no part of what is measured.
        key = f"begin/{way.__name__}/{num_buckets}/{call}"
        if store.add(f"{key}/came", 1) == options.ranks:
            store.set(key, "go")
        store.get(key)
        start = time.perf_counter()
        way(rank, options.ranks, num_buckets, call)
        times.append(time.perf_counter() - start)


if __name__ == "__main__":
    main()
