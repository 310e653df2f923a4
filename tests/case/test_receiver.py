"""The receiver of a sync, which is a process: it refuses a bucket that came before, and one that came in part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fsdp_doctor.case.receiver import Receiver, SentBucket, TensorHeader

_WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3)
_BUCKET = SentBucket(_WEIGHT.flatten().view(torch.uint8), [TensorHeader("layer.weight", _WEIGHT.shape, _WEIGHT.dtype)])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    yield started
    started.end()


def test_a_bucket_that_comes_twice_is_refused_by_name(receiver: Receiver) -> None:
    assert receiver.send(_BUCKET) == ""
    assert "layer.weight" in receiver.send(_BUCKET)
    assert torch.equal(receiver.take()["layer.weight"], _WEIGHT)


def test_a_bucket_without_its_end_is_refused_and_kept_out(receiver: Receiver) -> None:
    assert "23 of 24 bytes" in receiver.send(SentBucket(_BUCKET.buffer[:-1], _BUCKET.headers))
    assert receiver.take() == {}
