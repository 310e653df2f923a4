"""The ranks of one load: they begin it together, and an error of one is an error of all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch.distributed as dist
from torch import nn

from fsdp_doctor.extract.agreement import Agreement, ComparedPlan, PlanMismatch, RankLeft
from fsdp_doctor.extract.rank_groups import Comparison, Conflict
from fsdp_doctor.fsdp import reader
from fsdp_doctor.load.given import GivenSource, Kind
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.same_files import digests
from fsdp_doctor.load.targets import ranks_of

Holders = Literal["first", "all"]
_KINDS: tuple[Kind, ...] = ("mapping", "iterator", "files")


class Together:
    """written: how many tensors this rank has begun to write.

    refused: by name, what cannot be loaded, since groups of ranks have other tensors under one name.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._agreement = Agreement(ranks, "load", speaker=ranks[0])
        self.written = 0
        self.refused: Mapping[str, Conflict] = {}

    def begin(self, given: GivenSource, plan: Callable[[], Sequence[str]], comparison: Comparison) -> Holders:
        """Says who has the source: rank 0 alone, or every rank. Raises LoadError where it is neither."""
        if len(self._ranks) == 1:
            if given.kind is None:
                raise LoadError("there is no source")
            return "all"
        for kind in _KINDS:
            self._agreement.count(kind, int(given.kind == kind))
        self._agreement.expect(functools.cache(lambda: ComparedPlan(plan())), comparison)
        of_first = self.agree(given.kind or "")
        self.refused = comparison.conflicts
        counts = dict(zip(_KINDS, self._agreement.sums, strict=True))
        have = {kind: count for kind, count in counts.items() if count}
        if have == {of_first: len(self._ranks)}:
            if given.kind == "files":
                self._compare(given)
            return "all"
        if have == {of_first: 1}:
            return "first"
        said = ", ".join(f"{count} of {len(self._ranks)} ranks have {_ARTICLE[kind]}" for kind, count in have.items())
        raise LoadError(
            f"{said or 'no rank has a source'}: rank {self._ranks[0]} alone must have one, or every rank, of one kind"
        )

    def _compare(self, given: GivenSource) -> None:
        """Raises LoadError on a rank whose files are not those of rank 0, which the others hear of where they agree."""
        own = digests(given.in_files)
        others = tuple(self.agree(" ".join(own)).split())
        if others != own:
            what = "names, shapes or dtypes" if others[0] != own[0] else "values"
            raise LoadError(
                f"the files of rank {dist.get_rank()} in {', '.join(given.directories)} have other {what} "
                f"than those of rank {self._ranks[0]}: each node must have the same checkpoint"
            )

    def agree(self, word: str = "") -> str:
        """Returns rank 0's word once every rank has come. Raises RankLeft, PlanMismatch."""
        return self._agreement.proceed(word)

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """Raises LoadError where another rank fails inside; what this rank raises there, the others are told."""
        try:
            yield
            self._agreement.end()
        except (RankLeft, PlanMismatch) as error:
            raise LoadError(f"{error}; {self._extent('this rank')}") from None
        except LoadError as error:
            self._agreement.leave(f"{error}; {self._extent('it')}")
            raise LoadError(f"{error}; {self._extent('this rank')}") from error.__cause__
        except BaseException as error:
            self._agreement.leave(f"{_in_words(error)}; {self._extent('it')}")
            if sys.version_info >= (3, 11):
                error.add_note(f"While loading: {self._extent('this rank')}.")
            raise

    def _extent(self, who: str) -> str:
        return f"{who} had begun to write {self.written} tensors" if self.written else f"{who} had written nothing"


_ARTICLE: dict[Kind, str] = {"mapping": "a mapping", "iterator": "an iterable", "files": "files"}


@contextlib.contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Tells the others that this rank did not come as far as to agree on anything."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            Agreement(_likely_ranks(model), "load", speaker=0).leave(_in_words(error))
        raise


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _likely_ranks(model: nn.Module) -> tuple[int, ...]:
    """Those of the model, as far as it can be read; where it cannot be, all."""
    with contextlib.suppress(Exception):
        if ranks := ranks_of(reader.read(model)):
            return ranks
    return tuple(range(dist.get_world_size()))
