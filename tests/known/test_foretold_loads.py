"""What the catalogue foretells of loads: by device and ranks, and nothing of our own loaders."""

from __future__ import annotations

import pytest

from fsdp_doctor.known.catalogue import foretold, known_failures, of_case
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.loading_paths import LOADING_FIX, OPTIMIZER_FIX
from fsdp_doctor.matrix.selection import Selection, select

_LOADING = Selection(directions=("in",), level="full")


def _ids(case_id: str, **context: object) -> list[str]:
    case = select(Selection(case_ids=(case_id,)))[0]
    outcomes = foretold(case, RunContext(**{"torch": "2.13.0", "device": "emulated", **context}))  # type: ignore[arg-type]
    return ["ok" if entry is None else entry.id for entry in outcomes]


@pytest.mark.parametrize(
    ("case_id", "context", "expected"),
    [
        # The device: on the CPU an offload moves nothing, and gloo does not wait for bytes that do not come.
        ("fsdp2/policy/staged/fresh/dcp.load", {}, ["fsdp2-pinned-policy-half-moved"]),
        ("fsdp2/policy/staged/fresh/dcp.load", {"device": "cpu"}, ["ok"]),
        ("fsdp2/none/unstaged/fresh/bf16/distribute_tensor.assign", {}, ["broadcast-of-two-dtypes"]),
        (
            "fsdp2/none/unstaged/fresh/bf16/distribute_tensor.assign",
            {"device": "cpu"},
            ["broadcast-of-two-dtypes-over-gloo"],
        ),
        # Ranks: with one there is nobody to differ from.
        ("fsdp1/none/unstaged/fresh/load_full_state_dict.rank0", {}, ["fsdp1-rank0-only-is-for-saving"]),
        ("fsdp1/none/unstaged/fresh/load_full_state_dict.rank0", {"world_size": 1}, ["ok"]),
        ("fsdp2/none/unstaged/fresh/extra-key/set_model_state_dict.broadcast", {}, ["unexpected-key-on-rank0-alone"]),
        ("fsdp2/none/unstaged/fresh/extra-key/set_model_state_dict.broadcast", {"world_size": 1}, ["ok"]),
        (
            "fsdp2/none/unstaged/fresh/bf16/distribute_tensor.assign",
            {"world_size": 1},
            ["assign-takes-device-and-dtype-of-the-checkpoint"],
        ),
        # Three make every shard uneven, and the loader offloads without blocking: a race on an accelerator.
        ("fsdp2/param/unstaged/fresh/to_empty.broadcast", {}, ["ok"]),
        (
            "fsdp2/param/unstaged/fresh/to_empty.broadcast",
            {"world_size": 3},
            ["offload-after-the-load-loses-uneven-shards"],
        ),
        (
            "fsdp2/param/unstaged/fresh/to_empty.broadcast",
            {"world_size": 3, "device": "cuda"},
            ["offload-after-the-load-loses-uneven-shards", "ok"],
        ),
        # Of several problems the one that a verdict tells first: a lost tie before a device, a device before training.
        ("fsdp2/param/unstaged/qwen3-tied/fresh/load_state_dict.sharded+assign", {}, ["assign-unties"]),
        (
            "fsdp2/param/unstaged/fresh/load_state_dict.sharded+assign",
            {},
            ["assign-takes-device-and-dtype-of-the-checkpoint"],
        ),
        ("fsdp2/param/staged/fresh/load_state_dict.sharded+assign", {}, ["assign-leaves-the-optimizer-behind"]),
    ],
)
def test_what_is_foretold_of_a_load_depends_on_device_and_ranks(
    case_id: str, context: dict[str, object], expected: list[str]
) -> None:
    assert _ids(case_id, **context) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nothing_is_foretold_of_our_own_loaders(world_size: int) -> None:
    cases = select(Selection(directions=("in",), level="full", paths=(LOADING_FIX, OPTIMIZER_FIX)))
    assert len(cases) > 100
    assert [entry.id for case in cases for entry in of_case(case, RunContext(world_size=world_size))] == []


def test_every_reproduced_entry_of_loading_is_foretold_in_the_matrix() -> None:
    """In the full matrix of the emulated device or of the CPU, with two ranks."""
    cases = select(_LOADING)
    contexts = [RunContext(device=device) for device in ("emulated", "cpu")]
    found = {entry.id for context in contexts for case in cases for entry in foretold(case, context) if entry}
    expected = {entry.id for entry in known_failures() if entry.group == "loading" and entry.reproduced}
    assert not expected - found
