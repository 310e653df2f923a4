"""``fsdp-doctor memory measure`` and ``probe --memory``: the ledgers of a scenario's life, on two ranks."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import get_args
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
from program import Run, forked_doctor, probe
from support.emulation import needs_emulation

from fsdp_doctor.examination.memory_records import (
    DeviceMemory,
    JobStage,
    MemoryFile,
    StageMemory,
    read_memory_file,
    sum_classes,
)
from fsdp_doctor.report.formats import render
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.report.schema import make_report_schema

STAGES = get_args(JobStage)
_MOST_UNEXPLAINED = 0.01


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def done(directory: pathlib.Path) -> Run:
    needs_emulation()
    return forked_doctor(
        *("memory", "measure", "--strategy", "fsdp2,fsdp1", "--offload", "none,param+optimizer,policy"),
        *("--method", "full_tensors,get_model_state_dict.full", "--device", "emulated", "--device-memory", "64MiB"),
        *("--json", str(directory / "ledgers.json"), "--svg", str(directory / "ledgers.svg")),
    )


@pytest.fixture(scope="module")
def measured(done: Run, directory: pathlib.Path) -> MemoryFile:
    # Of one method it is known that it breaks under a staged policy.
    assert done.code == 0, done.stderr
    return read_memory_file((directory / "ledgers.json").read_text())


def _device(memory: StageMemory) -> DeviceMemory:
    assert memory.device is not None
    return memory.device


def _stages(measured: MemoryFile, job: str) -> Iterator[StageMemory]:
    return (memory for memory in measured.ledgers if memory.job == job and memory.rank == 0)


def _one(measured: MemoryFile, job: str, stage: str, method: str = "") -> StageMemory:
    return next(memory for memory in _stages(measured, job) if memory.stage == stage and method in ("", memory.method))


def test_every_rank_has_a_ledger_of_every_stage_of_every_job(measured: MemoryFile) -> None:
    jobs = {memory.job for memory in measured.ledgers}
    assert len(jobs) == 6
    for job in jobs:
        for rank in (0, 1):
            assert {memory.stage for memory in measured.ledgers if (memory.job, memory.rank) == (job, rank)} == set(
                STAGES
            )
    methods = {memory.method for memory in measured.ledgers if memory.stage == "extracted"}
    assert methods == {"full_tensors", "get_model_state_dict.full"}


def test_classes_add_up_to_what_the_allocator_counts_with_1_percent_unexplained(measured: MemoryFile) -> None:
    for memory in measured.ledgers:
        device = _device(memory)
        assert sum_classes(device.held) == device.allocated
        assert sum_classes(device.at_peak) == device.peak
        for held in (device.held, device.at_peak):
            assert abs(held.get("unexplained", 0)) <= _MOST_UNEXPLAINED * max(1, device.peak), (memory.name, held)
            assert all(nbytes >= 0 for name, nbytes in held.items() if name != "unexplained")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_under_3_percent_of_a_steps_peak_on_two_gpus_is_unexplained(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ledgers.json"
    size = ("--batch", "8", "--sequence", "2048")
    done = forked_doctor(
        "memory", "measure", "--strategy", "fsdp2,fsdp1", *size, "--device", "cuda", "--json", str(file)
    )
    assert done.code == 0, done.stderr
    for memory in read_memory_file(file.read_text()).ledgers:
        device = _device(memory)
        if memory.stage in ("trained", "trained again"):
            assert device.at_peak.get("unexplained", 0) <= 0.03 * device.peak, (memory.job, device)


def test_a_manual_offload_takes_parameters_and_optimizer_state_to_the_host(measured: MemoryFile) -> None:
    for strategy in ("fsdp2", "fsdp1"):
        job = f"{strategy}/param+optimizer/staged"
        trained, offloaded = _one(measured, job, "trained"), _one(measured, job, "offloaded")
        assert _device(trained).held["parameters"] > 0
        assert {"parameters", "optimizer state"}.isdisjoint(_device(offloaded).held)
        assert offloaded.host.held.keys() >= {"parameters", "optimizer state"}
        assert offloaded.host.pinned == 0
        staged = _one(measured, job, "staged")
        assert _device(staged).held["parameters"] == _device(trained).held["parameters"]


def test_a_policy_pins_and_rounding_shows(measured: MemoryFile) -> None:
    trained = _one(measured, "fsdp1/policy/staged", "trained").host
    assert trained.pinned == trained.held["parameters"] + trained.held["gradients"]
    assert trained.pinned_reserved > trained.pinned
    assert trained.pageable >= trained.held["optimizer state"]


def test_adamw_computes_in_memory_of_its_own_and_keeps_twice_the_parameters(measured: MemoryFile) -> None:
    first = _device(_one(measured, "fsdp2/none/staged", "first step"))
    assert 2 * first.held["parameters"] == first.held["optimizer state"]
    assert first.at_peak["optimizer state"] > first.held["optimizer state"]
    assert first.at_peak["gradients"] > 0


def test_a_step_has_gathered_parameters_activations_gradients_and_buffers_of_collectives(measured: MemoryFile) -> None:
    at_peak = _device(_one(measured, "fsdp2/none/staged", "trained")).at_peak
    expected = {"unsharded parameters", "activations", "gradients", "communication buffers"}
    assert expected <= {name for name, nbytes in at_peak.items() if nbytes}


def test_a_method_that_returns_a_state_dict_holds_it_whole(measured: MemoryFile) -> None:
    job = "fsdp2/none/staged"
    extracted = _device(_one(measured, job, "extracted", "get_model_state_dict.full"))
    shards = _device(_one(measured, job, "trained")).held["parameters"]
    assert extracted.at_peak["gathered outputs"] > 1.9 * shards
    assert "gathered outputs" not in extracted.held


def test_a_case_that_broke_is_a_line_below_the_tables(done: Run) -> None:
    (line,) = [line for line in done.stdout.splitlines() if ": crash: " in line]
    assert line.startswith("fsdp2/policy/staged/get_model_state_dict.full: crash: RuntimeError")


def test_the_picture_and_the_table_have_every_stage_and_the_limit(done: Run, directory: pathlib.Path) -> None:
    svg = ElementTree.fromstring((directory / "ledgers.svg").read_text())
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    for stage in STAGES:
        assert any((text or "").startswith(stage) for text in texts)
        assert stage in done.stdout
    assert "fsdp1/policy/staged" in done.stdout
    assert "…" not in done.stdout


def test_a_limit_that_is_near_is_a_line_and_a_number() -> None:
    from fsdp_doctor.examination.memory_records import HostMemory
    from fsdp_doctor.examination.memory_views import render_memory_svg, render_memory_table

    device = DeviceMemory(
        held={}, at_peak={"parameters": 900}, allocated=0, peak=900, reserved=900, peak_reserved=900, capacity=1000
    )
    host = HostMemory(held={}, pinned=0, pinned_reserved=0, pageable=0)
    memory = StageMemory(job="a & b", stage="built", rank=0, host=host, device=device)
    assert "limit 1.0 KiB" in render_memory_svg([memory])
    assert "a &amp; b" in render_memory_svg([memory])
    assert "of 1.0 KiB on the device" in render_memory_table([memory], 120)


def test_a_probe_with_memory_shows_ledgers_in_all_of_its_outputs(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.html"
    done = probe(
        tmp_path, "--memory", "--case", "fsdp2/param/staged/state_dict", "--html", str(page), device="emulated"
    )
    result = done.result("state_dict")
    assert {memory.stage for memory in result.ledgers} == set(STAGES)
    file = tmp_path / "report.json"
    assert result.ledgers == read_report(file).results[0].ledgers
    jsonschema.validate(json.loads(file.read_text()), make_report_schema(), cls=jsonschema.Draft202012Validator)
    assert done.report is not None
    assert "extracted: state_dict" in render(done.report, "memory")
    for part in ('"methods":["state_dict"]', "data:image/svg+xml"):
        assert part in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--device", "cpu"), 3, "CPU"),
        (("--batch", "0"), 2, "'--batch'"),
        (("--sequence", "-1"), 2, "'--sequence'"),
        (("--format", "xml"), 2, "'xml'"),
        (("--method", "nowhere"), 2, "'nowhere'"),
        (("--offload", "some"), 2, "'some'"),
        (("--device", "emulated", "--device-memory", "0"), 2, "'--device-memory': '0'"),
        (("--svg", "same", "--json", "same"), 2, "--json"),
        (("--device", "emulated", "--offload", "none", "--device-memory", "20KiB"), 3, "out of memory"),
        (("--device", "emulated", "--sharding", "hsdp"), 3, "hsdp"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence_and_an_exit_code(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: pathlib.Path
) -> None:
    needs_emulation()
    done = forked_doctor("memory", "measure", *arguments)
    assert done.code == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_ends_while_it_is_looked_at_is_a_verdict(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    (tmp_path / "ending.py").write_text("import os\ndef extract(model):\n    os.kill(os.getpid(), 9)\n")
    done = forked_doctor(
        *("memory", "measure", "--device", "emulated", "--offload", "none", "--method", "ending:extract"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.code == 1, done.stderr
    assert "SIGKILL" in done.stdout
    assert "first step" in done.stdout
    assert done.left == []
