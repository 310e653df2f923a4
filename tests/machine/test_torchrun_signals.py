"""A signal that ends torchrun's agent, wherever in torch's code it comes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from fsdp_doctor.errors import Interrupted
from fsdp_doctor.machine.launch import start_torchrun


def _signalled(*_: Any) -> NoReturn:
    raise SignalException("got signal: 2", signal.SIGINT)


def _signalled_before_the_time_is_taken(*_: Any) -> NoReturn:
    # As torch.distributed.elastic.metrics.api.prof ends if the signal comes in its first line.
    try:
        _signalled()
    finally:
        raise UnboundLocalError("cannot access local variable 'start'")


@pytest.mark.parametrize("agent", [_signalled, _signalled_before_the_time_is_taken])
def test_a_signal_is_no_fault_of_the_doctor(agent: Callable[..., NoReturn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: agent)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        start_torchrun([], 1)


def test_another_error_of_the_agent_is_not_taken_for_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> NoReturn:
        raise UnboundLocalError("cannot access local variable 'start'")

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: fails)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(UnboundLocalError):
        start_torchrun([], 1)
