"""One model of a job, as predicted: its shape, and the ledgers of its stages on a rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fsdp_doctor.errors import CannotRun, UsageError, first_line
from fsdp_doctor.ledgers.stage_ledger import StageLedger
from fsdp_doctor.plan.activations import Batch, LoopOverTokens, Segment, trace
from fsdp_doctor.plan.life import Life
from fsdp_doctor.plan.meta_model import learned_positions, on_meta, without_warnings
from fsdp_doctor.plan.model_shape import ModelShape, shape_of
from fsdp_doctor.plan.rank_shards import shards_of
from fsdp_doctor.plan.role_setup import ModelHead, RoleSetup

# What a forward raises that asks for values of tensors without them, or of its inputs for what it is not given.
_NOT_FOLLOWED = (RuntimeError, TypeError, AttributeError, LookupError, ValueError, AssertionError)


class Predictor:
    """Of one model, by name or directory, with its head; what was counted once is kept.

    Raises UsageError for a model that there is not, or that transformers cannot build; CannotRun for one whose forward
    asks for values that a model without weights has not.
    """

    def __init__(self, model: str, layers: int | None = None, head: ModelHead = "language") -> None:
        self._make = functools.partial(on_meta, model, layers, head)
        made = self._make()
        self.shape: ModelShape = shape_of(made, model)
        self._positions = learned_positions(made)
        self._traced: dict[Batch, tuple[Segment, ...]] = {}

    def ledgers(self, setup: RoleSetup, rank: int = 0) -> list[StageLedger]:
        """The stages on one rank of a shard group, of which the first has the most. Raises UsageError.

        A rank beyond the rows of every parameter would have nothing, and a token beyond the positions has none.
        """
        if self._positions is not None and setup.length > self._positions:
            raise UsageError(
                f"{setup.role}: sequences of {setup.length} tokens, and {self.shape.name} has learned "
                f"{self._positions} positions: give --seq-len"
            )
        longest = max(parameter.shape[0] for parameter in self.shape.parameters)
        if setup.shard_ranks > longest:
            raise UsageError(
                f"{setup.role}: {setup.shard_ranks} ranks share the model, but no parameter has more than {longest} "
                "rows: the last of them would have none"
            )
        shards = shards_of(self.shape, setup.scenario.strategy, rank=rank, ranks=setup.shard_ranks)
        return Life(setup, shards, self.shape.buffer_bytes, self._segments(setup), rank).stages()

    def _segments(self, setup: RoleSetup) -> Sequence[Segment]:
        batch = Batch(
            sequences=setup.sequences, length=setup.length, checkpointing=setup.checkpointing, backward=setup.trains
        )
        if batch not in self._traced:
            try:
                with without_warnings():
                    self._traced[batch] = trace(self._make(), batch)
            except LoopOverTokens:
                raise CannotRun(
                    f"{setup.role}: the forward of {self.shape.name} cannot be followed at {setup.length} tokens: it "
                    "goes through them one by one in Python, which takes minutes here, and on a device a kernel may do "
                    "it that holds less; a plan with a smaller --seq-len is no measure of this one"
                ) from None
            except _NOT_FOLLOWED as error:
                why = first_line(error)
                raise CannotRun(
                    f"{setup.role}: the forward of {self.shape.name} fails in bfloat16, or cannot be followed without "
                    f"weights: {why}"
                ) from None
        return self._traced[batch]
