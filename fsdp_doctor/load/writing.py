"""One load, from the moment when its targets and its source are known."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import nn

from fsdp_doctor.errors import some
from fsdp_doctor.extract.host_copies import HostCopies
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.load.checks import Matching, Rules
from fsdp_doctor.load.from_first_rank import FromFirstRank
from fsdp_doctor.load.given import GivenSource, Value
from fsdp_doctor.load.outcome import LoadError, LoadReport
from fsdp_doctor.load.own_parts import OwnParts
from fsdp_doctor.load.safetensors_files import FileTensor
from fsdp_doctor.load.targets import LoadedModel, Target
from fsdp_doctor.load.ties import Ties
from fsdp_doctor.load.together import Holders, Together

# Of a small model's bucket, which is divided among all ranks.
LOAD_BUCKET_BYTES = 512 << 20
_LEAST_BUCKET_BYTES = 1 << 20


def check_arguments(model: nn.Module, bucket_bytes: int) -> None:
    """Raises TypeError, ValueError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes must be a whole number, not {type(bucket_bytes).__name__}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")


class Load:
    """Of the tensors of a model, or of an optimizer."""

    def __init__(self, place: LoadedModel, targets: Sequence[Target], together: Together, bucket_bytes: int) -> None:
        self._place, self._targets = place, targets
        self._together = together
        full_bytes = sum(target.shape.numel() * target.dtype.itemsize for target in targets)
        self._bucket_bytes = min(bucket_bytes, max(full_bytes, _LEAST_BUCKET_BYTES))

    def run(self, have: GivenSource, holders: Holders, rules: Rules, begin: Callable[[], None]) -> LoadReport:
        """begin: called when all ranks have found that they can write, before they do."""
        if holders == "first" and self._place.partial:
            raise LoadError(
                f"{some(self._place.partial)}: sharded over a part of the model's ranks that is no submesh of one of "
                "all, so that rank 0 does not know who has what: give every rank the source"
            )
        matching = Matching(self._targets, rules, self._together.refused)
        if have.kind in ("mapping", "files"):
            matching.add_all(have.tensors)
        ties = Ties(self._targets, holders)
        ties.check(matching.found, have.tensors)
        streams = Streams(self._place.device)
        with contextlib.closing(HostCopies(streams)) as copies:
            items = self._items(have, matching, ties, copies)
            if holders == "first":
                return self._from_first(have, items, matching, copies, streams, begin)
            self._together.agree()
            begin()
            self._write_own(items, copies, streams)
            have.check_unchanged()
            self._together.agree()
            return _report(matching, self._together.written)

    def _items(
        self, have: GivenSource, matching: Matching, ties: Ties, copies: HostCopies
    ) -> Iterator[tuple[int, Value]]:
        """(place of a target, full tensor), each target once."""
        if have.kind != "iterator":
            for place, name in _in_order(matching, have):
                yield place, have.tensors[name]
                self._together.written += 1
                if have.makes_values:
                    copies.finish()
            return
        for name, value in have.values():
            target = matching.add(name, value)
            if target is not None and ties.is_first(target, name, value):
                yield target, value
                self._together.written += 1
                # The iterator may fill the same memory again.
                copies.finish()
        matching.complete()

    def _write_own(self, items: Iterator[tuple[int, Value]], copies: HostCopies, streams: Streams) -> None:
        own = OwnParts(copies, streams)
        for place, value in items:
            own.write(self._targets[place], value)
        own.finish()

    def _from_first(
        self,
        have: GivenSource,
        items: Iterator[tuple[int, Value]],
        matching: Matching,
        copies: HostCopies,
        streams: Streams,
        begin: Callable[[], None],
    ) -> LoadReport:
        if self._place.known_group is None:
            # One is about to be made, for which each rank waits for all others.
            self._together.agree()
        way = FromFirstRank(self._place, self._targets, self._bucket_bytes, self._together.agree, copies, streams)
        way.prepare()
        self._together.agree()
        begin()
        try:
            if dist.get_rank() == self._place.first:
                way.send(items)
                copies.finish()
                have.check_unchanged()
                report = _report(matching, self._together.written)
                self._together.agree(json.dumps(vars(report)))
            else:
                said = json.loads(way.receive(self._wrote))
                report = LoadReport(
                    loaded=said["loaded"], missing=tuple(said["missing"]), superfluous=tuple(said["superfluous"])
                )
        finally:
            way.finish()
        return report

    def _wrote(self, number: int) -> None:
        self._together.written += number


def _in_order(matching: Matching, have: GivenSource) -> list[tuple[int, str]]:
    """(place of a target, name in the source): of the model, but files are read from their beginnings to their ends."""
    places = [(place, matching.found[place][0]) for place in sorted(matching.found)]
    if have.kind == "files":
        begins = {name: (str(t.file.path), t.begin) for name, t in have.tensors.items() if isinstance(t, FileTensor)}
        places.sort(key=lambda one: begins[one[1]])
    return places


def _report(matching: Matching, loaded: int) -> LoadReport:
    return LoadReport(loaded=loaded, missing=tuple(matching.missing()), superfluous=tuple(matching.superfluous))
