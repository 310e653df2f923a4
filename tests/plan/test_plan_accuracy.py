"""The plan against what the emulated device counted: every stage, on 2 and on 4 ranks, and without shards."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from program import forked_doctor
from support.emulation import needs_emulation
from support.places import ROOT

from fsdp_doctor.examination.memory_records import MemoryFile, read_memory_file
from fsdp_doctor.matrix.axes import OFFLOADS

# As small as it can be with parameters, gathers and activations each a good part of it; its vocabulary is uneven.
_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4099,
    "tie_word_embeddings": False,
}
# A policy overrides manual offloads, so the others are the policy once more.
_OFFLOADS = ",".join(
    str(offload) for offload in OFFLOADS if offload.way is None and not (offload.policy and len(offload.flags) > 1)
)
_RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 ranks, five offloads": (
        2,
        (
            *("--strategy", "fsdp2,fsdp1", "--offload", _OFFLOADS, "--staging", "staged"),
            *("--batch", "2", "--sequence", "64"),
        ),
    ),
    "4 ranks, checkpointing, five methods": (
        4,
        (
            *("--strategy", "fsdp2,fsdp1,fsdp1-orig", "--offload", "none,policy"),
            *("--batch", "1", "--sequence", "128", "--activation-checkpointing"),
            *(
                "--method",
                "full_tensors,get_model_state_dict.full,unshard,state_dict.to.full_tensor,summon_full_params",
            ),
        ),
    ),
    # With hardly an activation, so that the parameters decide.
    "2 ranks, each with the whole model under the policy": (
        2,
        (
            *("--strategy", "fsdp2,fsdp1,fsdp1-orig", "--offload", "policy", "--sharding", "size1"),
            *("--staging", "staged", "--batch", "1", "--sequence", "8"),
        ),
    ),
}


def _accuracy() -> ModuleType:
    """benchmarks/plan_accuracy.py."""
    spec = importlib.util.spec_from_file_location("plan_accuracy", ROOT / "benchmarks" / "plan_accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=_RUNS, ids=str)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MemoryFile, argparse.Namespace]:
    """Returns what was measured, and of which sizes."""
    needs_emulation()
    ranks, options = _RUNS[request.param]
    directory = tmp_path_factory.mktemp("plan")
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    file = directory / "ledgers.json"
    common = ("memory", "measure", "--device", "emulated", "--model", str(directory))
    done = forked_doctor(*common, *options, "--json", str(file), ranks=ranks)
    assert file.exists(), done.stderr
    sizes = argparse.Namespace(
        model=str(directory),
        batch=int(options[options.index("--batch") + 1]),
        sequence=int(options[options.index("--sequence") + 1]),
        checkpointing="--activation-checkpointing" in options,
    )
    return read_memory_file(file.read_text()), sizes


@pytest.fixture(scope="module")
def stages(run: tuple[MemoryFile, argparse.Namespace]) -> list[Any]:
    found = list(_accuracy().compared(*run))
    assert len(found) >= (27 if run[1].sequence == 8 else 90)
    return found


def test_less_than_1_percent_of_the_peak_is_unexplained_in_every_stage(
    run: tuple[MemoryFile, argparse.Namespace],
) -> None:
    for memory in run[0].ledgers:
        assert memory.device is not None
        for held in (memory.device.held, memory.device.at_peak):
            assert abs(held.get("unexplained", 0)) < 0.01 * memory.device.peak, (memory.job, memory.name, held)


def test_parameters_gradients_and_optimizer_are_within_five_percent_in_every_stage(stages: list[Any]) -> None:
    off = [f"{row.job} {row.stage}: {row.held}" for row in stages if abs(row.deviations[0]) > 0.05]
    assert off == []


def test_what_a_method_gathers_is_within_five_percent(stages: list[Any]) -> None:
    extracted = [row for row in stages if row.stage.startswith("extracted")]
    off = [f"{row.job} {row.stage}: {row.peak}" for row in extracted if abs(row.deviations[1]) > 0.05]
    assert extracted
    assert off == []


def test_the_whole_peak_is_within_ten_percent_in_every_stage(stages: list[Any]) -> None:
    off = [f"{row.job} {row.stage}: {row.peak}" for row in stages if abs(row.deviations[1]) > 0.10]
    assert off == []


def test_the_host_with_the_rounding_of_pinned_memory_is_within_five_percent(stages: list[Any]) -> None:
    off = [f"{row.job} {row.stage}: {row.host}" for row in stages if abs(row.deviations[2]) > 0.05]
    assert any(row.host[1] for row in stages)
    assert off == []
