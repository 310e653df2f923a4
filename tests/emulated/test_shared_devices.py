"""Emulated devices that several processes share: what one holds is not free for the others."""

from __future__ import annotations

import json
import pathlib

import pytest
from program import python_prints
from support.emulation import needs_emulation

_MIB = 1 << 20
# A process forked before either has used the device; each waits for what the other says.
_TWO_PROCESSES = """
import json, os, sys, torch
import fsdp_doctor.emulated

def used_by(nbytes):
    device.share_devices({file!r})
    device.set_memory_limit(64 << 20)
    return torch.empty(nbytes, dtype=torch.uint8, device="emulated")

device = torch.emulated
to_child, from_child = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    held = used_by(40 << 20)
    os.write(from_child[1], b".")
    os.read(to_child[0], 1)
    os._exit(0)
os.read(from_child[0], 1)
found = {{"with both": None}}
held = used_by(8 << 20)
found["with both"] = device.mem_get_info()
try:
    torch.empty(20 << 20, dtype=torch.uint8, device="emulated")
except torch.OutOfMemoryError as error:
    found["refused"] = str(error)
found["allocated"] = device.memory_allocated()
os.write(to_child[1], b".")
os.waitpid(child, 0)
found["when the other has ended"] = device.mem_get_info()
try:
    device.share_devices({file!r})
except RuntimeError as error:
    found["twice"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    needs_emulation()
    file = tmp_path_factory.mktemp("devices") / "shared"
    said: dict[str, object] = json.loads(python_prints(_TWO_PROCESSES.format(file=str(file))))
    return said


def test_what_another_process_holds_is_not_free_and_not_allocated_here(found: dict[str, object]) -> None:
    assert found["with both"] == [16 * _MIB, 64 * _MIB]
    assert found["allocated"] == 8 * _MIB


def test_the_limit_is_one_of_all_processes_together(found: dict[str, object]) -> None:
    assert "Tried to allocate 20.00 MiB" in str(found["refused"])
    assert "16.00 MiB is free" in str(found["refused"])


def test_what_a_process_held_is_free_when_it_has_ended(found: dict[str, object]) -> None:
    assert found["when the other has ended"] == [56 * _MIB, 64 * _MIB]


def test_a_process_shares_its_devices_once(found: dict[str, object]) -> None:
    assert found["twice"] == "this process shares its devices already"


def test_a_file_that_cannot_be_made_is_a_value_error(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    import torch

    with pytest.raises(ValueError, match="cannot open"):
        torch.get_device_module("emulated").share_devices(tmp_path / "missing" / "file")
