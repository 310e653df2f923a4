"""``fsdp-doctor memory rollout``: an engine's stand-in beside a trainer's worker, each a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest
import torch
from program import Run, doctor
from support import inside
from support.emulation import needs_emulation

from fsdp_doctor.bench import rollout
from fsdp_doctor.bench.rollout import (
    EngineStart,
    RolloutAttempt,
    RolloutRequest,
    RunningProcess,
    find_remedies,
    render_rollout_text,
)
from fsdp_doctor.errors import CannotRun
from fsdp_doctor.matrix.axes import Sharding, Strategy
from fsdp_doctor.memory_use.records import (
    Bytes,
    DeviceMemory,
    HostMemory,
    MemoryFile,
    StageMemory,
    read_memory_file,
    sum_classes,
)

_MIB = 1 << 20
# The model has 8 MiB in bfloat16.
_SMALL = ("memory", "rollout", "--model", "small", "--device", "emulated", "--device-memory", "24MiB")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("rollout") / "ledgers.json"


@pytest.fixture(scope="module")
def sharded(file: pathlib.Path) -> Run:
    needs_emulation()
    sharding = ("--sharding", "full", "--nproc", "2", "--gpu-memory-utilization", "0.9")
    return doctor(*_SMALL, *sharding, "--json", str(file))


@pytest.fixture(scope="module")
def memory_file(sharded: Run, file: pathlib.Path) -> MemoryFile:
    assert sharded.code == 1, sharded.stderr
    return read_memory_file(file.read_text())


def _device(memory_file: MemoryFile, number: int) -> DeviceMemory:
    device = memory_file.ledgers[number].device
    assert device is not None
    return device


def test_half_of_a_sharded_model_is_beside_the_engine_and_in_its_way(sharded: Run, memory_file: MemoryFile) -> None:
    assert _device(memory_file, 0).held["parameters"] == pytest.approx(4 * _MIB, rel=0.01)
    assert "(0.9, 21.60 MiB)" in sharded.stdout


def test_what_one_process_holds_is_elsewhere_for_the_other(memory_file: MemoryFile) -> None:
    trainer, engine = _device(memory_file, 0), _device(memory_file, 1)
    assert engine.elsewhere == trainer.reserved


def test_without_the_fsdp_model_the_engine_has_weights_and_a_cache_up_to_its_share(memory_file: MemoryFile) -> None:
    engine = _device(memory_file, 3)
    assert engine.held["parameters"] == pytest.approx(8 * _MIB, rel=0.01)
    assert sum_classes(engine.held) == engine.allocated == pytest.approx(0.9 * 24 * _MIB, rel=0.01)
    assert memory_file.notes[1].endswith("the engine started")


def test_every_remedy_says_what_it_frees_and_whether_it_is_enough(sharded: Run) -> None:
    _, _, remedies = sharded.stdout.partition("What would free how much on this device:\n")
    assert len(remedies.splitlines()) == 3
    for line in remedies.splitlines():
        assert " MiB  " in line
        assert "the engine starts" in line or "not enough" in line


def _attempt(*, share: float, weights: int, free: int) -> RolloutAttempt:
    """On a device of 24 MiB, of which a trainer has reserved what is not free."""
    reserved = 24 * _MIB - free
    held: Bytes = {"parameters": reserved}
    device = DeviceMemory(
        held=held, at_peak=held, allocated=reserved, peak=reserved, reserved=reserved, peak_reserved=reserved
    )
    memory = StageMemory(
        job="trainer",
        stage="built",
        rank=0,
        host=HostMemory(held={}, pinned=0, pinned_reserved=0, pageable=0),
        device=device,
    )
    start = EngineStart(
        free=free, total=24 * _MIB, requested=int(24 * _MIB * share), weights=weights, refusal="refused"
    )
    return RolloutAttempt(trainer_state="loaded", trainer=memory, engine=memory, start=start)


_REQUEST = RolloutRequest(
    model="small",
    layers=None,
    strategy=Strategy.FSDP2,
    sharding=Sharding.SIZE1,
    dtype="bf16",
    utilization=0.1,
    device="emulated",
    memory=24 * _MIB,
    ranks=1,
)


@pytest.mark.parametrize(("free", "suffices"), [(16, True), (8, False)])
def test_a_share_smaller_than_the_weights_has_one_remedy_a_larger_share(free: int, suffices: bool) -> None:
    loaded = _attempt(share=0.1, weights=8 * _MIB, free=free * _MIB)
    (remedy,) = find_remedies(_REQUEST, loaded)
    assert (remedy.frees, remedy.suffices) == (0, suffices)
    assert remedy.setting.startswith("gpu_memory_utilization=0.34: ")


def test_weights_larger_than_the_device_have_no_remedy_and_no_heading_for_one() -> None:
    loaded = _attempt(share=0.9, weights=32 * _MIB, free=16 * _MIB)
    assert find_remedies(_REQUEST, loaded) == []
    assert "What would free" not in render_rollout_text(_REQUEST, [loaded])


def test_a_share_that_is_not_free_is_remedied_by_what_frees_as_much_and_by_a_smaller_one() -> None:
    *freeing, smaller = find_remedies(_REQUEST, _attempt(share=0.9, weights=8 * _MIB, free=16 * _MIB))
    assert freeing
    assert all(remedy.frees > 0 for remedy in freeing)
    assert smaller.setting.startswith("gpu_memory_utilization=0.66: ")


def test_no_process_outlives_the_command(sharded: Run) -> None:
    assert sharded.left == []


def _has_no_room(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("emulated out of memory\nand more")


def test_a_worker_that_has_no_room_for_the_model_sends_the_first_line_of_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(rollout, "_share_devices", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(rollout, "_load_trainer", _has_no_room)
    rollout._run_trainer(theirs, _REQUEST, "loaded", tmp_path, 0)
    assert ours.recv() == "emulated out of memory"


def test_a_device_smaller_than_the_model_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_emulation()

    class Refused(contextlib.nullcontext[None]):
        def __init__(self, *_: object) -> None:
            super().__init__()

        def __enter__(self) -> Refused:  # type: ignore[override]
            return self

        def receive_report(self) -> str:
            return "emulated out of memory"

    monkeypatch.setattr(rollout, "RunningProcess", Refused)
    done = inside.doctor(*_SMALL)
    (line,) = done.stderr.splitlines()
    assert (done.code, line.endswith(": emulated out of memory")) == (3, True)


def ends_at_once(pipe: Connection) -> None:
    os._exit(7)


def test_a_process_that_ends_before_it_says_what_it_holds_is_told() -> None:
    context = multiprocessing.get_context("spawn")
    with (
        RunningProcess(context, "the engine", ends_at_once) as process,
        pytest.raises(CannotRun, match="exit code 7 before"),
    ):
        process.receive_report()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu-memory-utilization", "1.5"), 2, "--gpu-memory-utilization"),
        (("--model", "of-nobody"), 2, "of-nobody"),
        (("--sharding", "hsdp"), 2, "hsdp"),
        (("--nproc", "0"), 2, "--nproc"),
        (("--device-memory", "much"), 2, "'--device-memory': 'much'"),
        (("--device", "cpu"), 3, "CPU"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = inside.doctor("memory", "rollout", "--model", "small", "--device", "emulated", *arguments)
    assert done.code == code
    (line,) = done.stderr.splitlines()
    assert words in line
