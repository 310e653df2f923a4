"""examples/verl-4726: what an extraction leaves on the device, in bytes."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, forked_doctor
from support.emulation import needs_emulation
from support.places import ROOT

from fsdp_doctor.ledgers.ledger import DeviceLedger, ledgers_from_json

DIRECTORY = ROOT / "examples" / "verl-4726"
KEPT, GIVEN_BACK = "keep_on_gpu:kept", "keep_on_gpu:given_back"
_JOB = ("--strategy", "fsdp1", "--offload", "param+optimizer", "--staging", "unstaged")


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("keep") / "ledgers.json"


@pytest.fixture(scope="module")
def done(json_file: pathlib.Path) -> Run:
    needs_emulation()
    return forked_doctor(
        *(
            "memory",
            "measure",
            "--device",
            "emulated",
            *_JOB,
            "--path",
            f"{KEPT},{GIVEN_BACK}",
            "--json",
            str(json_file),
        ),
        env={"PYTHONPATH": str(DIRECTORY)},
    )


@pytest.fixture(scope="module")
def ledgers(done: Run, json_file: pathlib.Path) -> dict[tuple[str, str], DeviceLedger]:
    assert done.code == 1, done.stderr
    found = ledgers_from_json(json_file.read_text()).ledgers
    return {(one.stage, one.path): one.device for one in found if one.rank == 0 and one.device is not None}


def test_what_a_path_loads_and_does_not_offload_stays_on_the_device(
    ledgers: dict[tuple[str, str], DeviceLedger],
) -> None:
    shards = ledgers["trained", ""].held["parameters"]
    assert "parameters" not in ledgers["offloaded", ""].held
    for stage in ("extracted", "offloaded again"):
        assert ledgers[stage, KEPT].held["parameters"] == shards
        assert "parameters" not in ledgers[stage, GIVEN_BACK].held
    assert ledgers["extracted", GIVEN_BACK].at_peak["parameters"] == shards


def test_the_probe_says_that_the_path_changed_where_the_shards_are(done: Run) -> None:
    (line,) = [line for line in done.stdout.splitlines() if KEPT in line and "poisoned" in line]
    assert "_flat_param" in line


def test_the_readme_has_the_lines_that_are_printed(done: Run) -> None:
    printed = [line.split() for line in done.stdout.splitlines()]
    text = (DIRECTORY / "README.md").read_text()
    quoted = [line.split() for line in text.split("```")[3].splitlines() if line.strip()]
    assert quoted
    for words in quoted:
        assert any(line[: len(words)] == words for line in printed), words
