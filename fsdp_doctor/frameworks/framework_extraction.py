"""What a framework gives: weights in memory or in files, held against the reference as those of any path are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_doctor.case import reference, yielded
from fsdp_doctor.case.extraction import ExtractionCheck
from fsdp_doctor.case.lora_reference import merged_weights
from fsdp_doctor.frameworks.adapter import STEPS_BEFORE, FrameworkSession, SavedFiles
from fsdp_doctor.frameworks.framework_run import FrameworkRun
from fsdp_doctor.frameworks.saved_weights import weights_in
from fsdp_doctor.fsdp import private


class FrameworkExtraction(FrameworkRun):
    """A path that extracts: reference, manual offload, the path, manual load, the next step."""

    def _train(self, session: FrameworkSession, kept: bool) -> None:
        first = 0 if kept else STEPS_BEFORE

        def at(number: int) -> None:
            if number == first:
                self._exercise(session)
            elif number > first:
                self._runtime.synchronize()

        session.train(first + 1, self._between_steps(at))

    def _exercise(self, session: FrameworkSession) -> None:
        self._recorder.enter("reference")
        truth = reference.take(session.model, None, self._runtime)
        self._recorder.enter("offload")
        session.offload()
        check = ExtractionCheck(self._recorder, self._runtime, session.model, session.optimizer, truth)
        expected = yielded.ExpectedYield(
            contract=self._case.way.contract,
            reference=truth,
            rank=self._runtime.rank,
            compute_device=self._runtime.device,
            compute_dtype=torch.bfloat16,
            parameter_devices=yielded.parameter_devices(session.model),
            shard_group_of_one=self._runtime.world_size == 1,
            merged_weights=merged_weights(session.model, truth.full),
        )
        check.run(lambda: self._entries(session), expected, live_tensors=_ids(session))
        self._agree_or_stop()
        self._recorder.enter("next step")
        session.onload()
        check.check_weights("the next training step would start from other weights")

    def _entries(self, session: FrameworkSession) -> Iterator[tuple[str, Any]]:
        result = session.extractions()[self._case.path](self._directory)
        if isinstance(result, SavedFiles):
            # What one rank writes, another is not to read before it is there.
            dist.barrier(group=self._runtime.control)
            return weights_in(result)
        return yielded.entries_of(result)


def _ids(session: FrameworkSession) -> set[int]:
    """Of the tensors that live as long as the session."""
    state = (value for values in session.optimizer.state.values() for value in values.values())
    own = [*session.model.parameters(), *session.model.buffers(), *state]
    shards = (private.local_tensor(tensor) for tensor in own if isinstance(tensor, DTensor))
    return {id(tensor) for tensor in itertools.chain(own, shards)}
