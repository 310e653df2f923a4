"""Groups of ranks that run side by side on the same devices and share the cases of a run: ``--jobs``.

Each group is a separate run, with its own store and workers. When a group has finished a block of cases, it takes the
next block; a block has the cases of one scenario. The first group gathers all results and writes the report.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.report.document import CaseResult, read_result_dict

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_SECONDS = 0.05


class SharedCases:
    """The cases of a run, as the first rank of each group sees them.

    store: a store that all groups can reach.
    check: a function that is called repeatedly while the group waits for others; an exception that it raises ends the
        wait.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        self._store = store
        self._check = check
        self._num_read = 0

    def offer(self, cases: Sequence[AnyCase], numbers: Sequence[int]) -> None:
        """Offers the cases with these numbers to all groups. Called by the first group."""
        blocks = itertools.groupby(numbers, key=lambda number: cases[number].scenario)
        self._num_offered = len(numbers)
        self._store.set("blocks", json.dumps([list(block) for _, block in blocks]))

    def take(self) -> Iterator[int]:
        """Waits until cases are offered, and yields the numbers of the cases that this group takes."""
        while not self._store.check(["blocks"]):
            self._check()
            time.sleep(_POLL_SECONDS)
        blocks = json.loads(self._store.get("blocks"))
        while (index := self._store.add("taken", 1) - 1) < len(blocks):
            yield from blocks[index]

    def post(self, result: CaseResult) -> None:
        number = self._store.add("posted", 1)
        self._store.set(f"result/{number}", json.dumps(msgspec.to_builtins(result)))

    def report_trouble(self, sentence: str) -> None:
        """Ends the run of all groups."""
        self._store.set("trouble", sentence)

    def gather(self, results: Iterator[CaseResult]) -> Iterator[CaseResult]:
        """Yields the first group's results and the results that other groups post.

        Raises DoctorFault if a group reports trouble.
        """
        num_own = 0
        for result in results:
            num_own += 1
            yield result
            yield from self._read_posted()
        while num_own + self._num_read < self._num_offered:
            self._check()
            time.sleep(_POLL_SECONDS)
            yield from self._read_posted()

    def _read_posted(self) -> Iterator[CaseResult]:
        if self._store.check(["trouble"]):
            raise DoctorFault(f"another group of ranks: {self._store.get('trouble').decode()}")
        num_posted = self._store.add("posted", 0)
        while self._num_read < num_posted:
            self._num_read += 1
            yield read_result_dict(json.loads(self._store.get(f"result/{self._num_read}")))
