"""A start or a case on all ranks: what they tell one another of it over the store until all have reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdp_doctor.probe.instructions import StopWorker, stop_from_json, to_json
from fsdp_doctor.verdict.records import RankReport, rank_report_from_dict, rank_report_to_dict

if TYPE_CHECKING:
    import torch.distributed as dist


class Round:
    """Supervisors count rounds alike, so that all mean the same keys.

    Nothing here waits for another rank.
    """

    def __init__(self, store: dist.Store, number: int, world_size: int) -> None:
        self._store = store
        self._number = number
        self._world_size = world_size
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Since this rank began the round."""
        return time.monotonic() - self._began

    def post(self, report: RankReport) -> None:
        """The rank is through with the round."""
        self._store.set(self._report_key(report.rank), json.dumps(rank_report_to_dict(report)))

    def is_over(self) -> bool:
        """Whether every rank has posted its report."""
        return self._have_posted(range(self._world_size))

    def others_are_through(self, rank: int) -> bool:
        """Whether every rank but this one has posted its report; False where there is no other."""
        others = [other for other in range(self._world_size) if other != rank]
        return not others or self._have_posted(others)

    def reports(self) -> list[RankReport]:
        """All ranks' reports, once the round is over."""
        keys = [self._report_key(rank) for rank in range(self._world_size)]
        return [rank_report_from_dict(json.loads(self._store.get(key))) for key in keys]

    def tell_trouble(self, rank: int) -> None:
        """The rank can keep the others from finishing."""
        self._store.set(self._key("trouble"), str(rank))

    def is_in_trouble(self) -> bool:
        """Whether some rank can keep the others from finishing."""
        return self._there(self._key("trouble"))

    def order_stop(self, stop: StopWorker) -> None:
        """For the conductor: every worker that is not through is to be ended."""
        self._store.set(self._key("stop"), to_json(stop))

    def stop(self) -> StopWorker | None:
        """The conductor's order; None until it gives one."""
        key = self._key("stop")
        return stop_from_json(self._store.get(key)) if self._there(key) else None

    def tell_idle(self, rank: int, seconds: float) -> None:
        """The rank's worker has done nothing for that long."""
        self._store.set(self._idle_key(rank), str(seconds))

    def idle_seconds(self) -> float:
        """For how long no worker has done anything, of those that are not through; 0 where one has not said."""
        working = [rank for rank in range(self._world_size) if not self._there(self._report_key(rank))]
        if not working or not self._store.check([self._idle_key(rank) for rank in working]):
            return 0.0
        return min(float(self._store.get(self._idle_key(rank))) for rank in working)

    def _have_posted(self, ranks: Iterable[int]) -> bool:
        return bool(self._store.check([self._report_key(rank) for rank in ranks]))

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _report_key(self, rank: int) -> str:
        return self._key(f"report/{rank}")

    def _idle_key(self, rank: int) -> str:
        return self._key(f"idle/{rank}")

    def _key(self, name: str) -> str:
        return f"round/{self._number}/{name}"
