"""benchmarks/weights.py --direction in, on CPU ranks and on the emulated device."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from program import Run, forked_script
from support.emulation import needs_emulation
from support.places import ROOT

_SCRIPT = ROOT / "benchmarks" / "weights.py"
_LAYERS = ("--layers", "1", "--repeat", "1", "--direction", "in")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    needs_emulation()
    directory = tmp_path_factory.mktemp("bench")
    run = forked_script(
        _SCRIPT,
        *("--device", "emulated", *_LAYERS, "--json", str(directory / "bench.json")),
        *("--strategy", "fsdp2,fsdp1", "--offload", "none,policy"),
        env={"TMPDIR": str(directory)},
    )
    assert run.code == 0, run.stderr
    assert [path.name for path in directory.iterdir()] == ["bench.json"]
    return run, json.loads((directory / "bench.json").read_text())


def test_every_method_is_measured_from_every_source_that_it_has(emulated: tuple[Run, dict[str, Any]]) -> None:
    _, report = emulated
    rows = {(row["strategy"], row["offload"], row["source"], row["method"]) for row in report["measured"]}
    for method in ("load_full_tensors", "set_model_state_dict.broadcast"):
        for row in (("fsdp2", "none", "rank0"), ("fsdp2", "policy", "ranks"), ("fsdp1", "none", "files")):
            assert (*row, method) in rows
    assert ("fsdp2", "none", "ranks", "set_model_state_dict.full") in rows
    assert ("fsdp2", "none", "rank0", "set_model_state_dict.full") not in rows
    assert not [row["error"] for row in report["measured"] if row["error"]]


def test_each_row_has_its_time_its_ratios_and_its_memory(emulated: tuple[Run, dict[str, Any]]) -> None:
    run, report = emulated
    assert all(rate > 0 for rate in report["links"].values())
    for row in report["measured"]:
        assert row["seconds"] > 0
        assert row["ratio"] > 0
        if row["method"] == "set_model_state_dict.broadcast":
            assert row["times_torch"] == 1
        assert row["source"] in run.stdout
    assert "x torch" in run.stdout


def test_a_rank_that_reads_its_own_rows_takes_no_device_memory(emulated: tuple[Run, dict[str, Any]]) -> None:
    _, report = emulated
    ours = [row for row in report["measured"] if row["method"] == "load_full_tensors"]
    assert {row["peak_extra_bytes"] for row in ours if row["source"] != "rank0"} == {0}
    (whole,) = {row["full_bytes"] for row in ours if row["strategy"] == "fsdp2"}
    assert all(0 < row["peak_extra_bytes"] < 2 * whole for row in ours if row["source"] == "rank0")


def test_one_method_from_one_source_on_the_cpu(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--device", "cpu", "--source", "files", "--method", "load_full_tensors", "--json", str(file))
    run = forked_script(_SCRIPT, *_LAYERS, *options)
    assert run.code == 0, run.stderr
    (row,) = json.loads(file.read_text())["measured"]
    assert (row["source"], row["method"], row["times_torch"]) == ("files", "load_full_tensors", None)
