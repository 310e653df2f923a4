"""Agreement of the ranks of one load: they begin it together, and an error of one rank is raised on all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch.distributed as dist
from torch import nn

from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.source import LoadSource, SourceKind
from fsdp_doctor.weights.transport.agreement import Agreement, ComparedPlan, PlanMismatch, RankLeft
from fsdp_doctor.weights.transport.rank_groups import Comparison, Conflict

Holders = Literal["first", "all"]
_KINDS: dict[SourceKind, str] = {"mapping": "a mapping", "iterator": "an iterable", "files": "files"}


class LoadAgreement:
    """Agreement of the ranks of one load, and its progress on this rank.

    num_written: the number of tensors that this rank has begun to write.
    conflicts: by name, tensors that cannot be loaded because groups of ranks have different tensors under one name.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._agreement = Agreement(ranks, "load", speaker=ranks[0])
        self.num_written = 0
        self.conflicts: Mapping[str, Conflict] = {}

    def begin(
        self, source: LoadSource, plan: Callable[[], Sequence[str]], comparison: Comparison, names: str = ""
    ) -> tuple[Holders, str]:
        """Compares the ranks' plans. Returns who has the source (only rank 0, or every rank), and rank 0's ``names``.

        Raises LoadError if neither rank 0 alone nor every rank has a source of the same kind, or if the ranks' files
        differ.
        """
        if len(self._ranks) == 1:
            if source.kind is None:
                raise LoadError("the source must not be None if there is only one rank")
            return "all", names
        for kind in _KINDS:
            self._agreement.count(kind, int(source.kind == kind))
        self._agreement.expect(functools.cache(lambda: ComparedPlan(plan())), comparison)
        kind_of_first, _, names = self.agree(f"{source.kind or ''} {names}").partition(" ")
        self.conflicts = comparison.conflicts
        counts = {kind: count for kind, count in zip(_KINDS, self._agreement.sums, strict=True) if count}
        if counts == {kind_of_first: len(self._ranks)}:
            if source.kind == "files":
                self._compare_files(source)
            return "all", names
        if counts == {kind_of_first: 1}:
            return "first", names
        statement = ", ".join(
            f"{count} of {len(self._ranks)} ranks have {_KINDS[kind]}" for kind, count in counts.items()
        )
        raise LoadError(
            f"{statement or 'no rank has a source'}: either only rank {self._ranks[0]} or every rank must have a "
            "source, all of one kind"
        )

    def _compare_files(self, source: LoadSource) -> None:
        """Raises LoadError on a rank whose files differ from rank 0's. The other ranks raise it at the next
        agreement.
        """
        digests = source.digest_files()
        first_digests = tuple(self.agree(" ".join(digests)).split())
        if first_digests != digests:
            what = "names, shapes or dtypes" if first_digests[0] != digests[0] else "values"
            directories = sorted({str(file.path.parent) for file in source.files})
            raise LoadError(
                f"the files of rank {dist.get_rank()} in {', '.join(directories)} have other {what} than the files "
                f"of rank {self._ranks[0]}: each node must have the same checkpoint"
            )

    def count_written(self, number: int) -> None:
        self.num_written += number

    def agree(self, word: str = "") -> str:
        """Waits until every rank has called this, and returns rank 0's ``word``.

        Raises RankLeft if another rank has failed, and PlanMismatch if the ranks' plans differ.
        """
        return self._agreement.proceed(word)

    @contextlib.contextmanager
    def announce_errors(self) -> Iterator[None]:
        """Tells the other ranks about an error in the block, and raises LoadError if another rank fails."""
        try:
            yield
            self._agreement.end()
        except (RankLeft, PlanMismatch) as error:
            raise LoadError(f"{error}; {self._describe_extent('this rank')}") from None
        except LoadError as error:
            self._agreement.leave(f"{error}; {self._describe_extent('it')}")
            raise LoadError(f"{error}; {self._describe_extent('this rank')}") from error.__cause__
        except BaseException as error:
            self._agreement.leave(f"{_describe_error(error)}; {self._describe_extent('it')}")
            if sys.version_info >= (3, 11):
                error.add_note(f"While loading: {self._describe_extent('this rank')}.")
            raise

    def _describe_extent(self, who: str) -> str:
        return f"{who} had {f'begun to write {self.num_written} tensors' if self.num_written else 'written nothing'}"


@contextlib.contextmanager
def announce_early_errors(model: nn.Module) -> Iterator[None]:
    """Tells the other ranks about an error in the block, before this rank has determined the ranks of the load."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            ranks = _guess_ranks(model)
            Agreement(ranks, "load", speaker=ranks[0]).leave(_describe_error(error))
        raise


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _guess_ranks(model: nn.Module) -> tuple[int, ...]:
    """Returns the ranks of the model, or all ranks if the model cannot be read."""
    with contextlib.suppress(Exception):
        if ranks := reader.read(model).ranks:
            return ranks
    return tuple(range(dist.get_world_size()))
