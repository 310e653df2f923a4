"""Expectations of the catalogue by torch, device and ranks; every committed report agrees with them."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from program import ROOT

from fsdp_doctor.known.catalogue import list_expected_failures, list_expected_outcomes, read_catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.methods import LOADING_FIX, OPTIMIZER_FIX
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.probe.baseline import Judgement
from fsdp_doctor.report.document import make_context, recognize_failure
from fsdp_doctor.report.journal import read_report

_REPORTS = sorted((ROOT / "examples" / "reports").rglob("*.json*"))
# When these reports were made, buffers that a method moves and moves back counted as a change, the emulated device did
# not look for what the host writes while it is copied, and weights on the host were rounded on the GPU, whose NaNs
# differ; see their README. The last is of torch 2.11 on CUDA, and is ok with torch 2.13 on the emulated device.
_SINCE_THEN = {
    "fsdp2/param/staged/qwen3-buffers/state_dict.held",
    "fsdp2/param+optimizer/staged/qwen3-buffers/state_dict.held",
    "fsdp2/policy/unstaged/qwen3-lora/lora.merged",
    *(
        f"{strategy}/{offload}/unstaged/fresh/fp32/set_optimizer_state_dict.{form}"
        for strategy in ("fsdp2", "fsdp1", "fsdp1-orig")
        for offload in ("param", "policy")
        for form in ("full", "broadcast", "sharded")
    ),
    "fsdp2/none/unstaged/fresh/inference/set_optimizer_state_dict.full",
}


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def _ids(case_id: str, **context: object) -> list[str]:
    """The ids of the expected outcomes of a case; ``ok`` for none."""
    outcomes = list_expected_outcomes(
        _case(case_id), RunContext(**{"torch": "2.13.0", "device": "emulated", **context})
    )  # type: ignore[arg-type]
    return ["ok" if entry is None else entry.id for entry in outcomes]


@pytest.mark.parametrize("file", _REPORTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_verdict_of_a_committed_report_is_expected(file: pathlib.Path) -> None:
    """Refusals are left out: no committed report judged them by what the method makes of the exact checkpoint."""
    report = read_report(file)
    context = make_context(report)
    judged = [one for one in report.results if one.id not in _SINCE_THEN and one.verdict.kind != "refused"]
    results = tuple(recognize_failure(result, context) for result in judged)
    assert len(results) > (0 if file.parent.name == "frameworks" else 100)
    assert Judgement(dataclasses.replace(report, results=results), "known").unexpected == []


@pytest.mark.parametrize(
    ("case_id", "context", "expected"),
    [
        # The device.
        ("fsdp2/policy/staged/state_dict", {}, ["fsdp2-pinned-policy-half-moved"]),
        ("fsdp2/policy/staged/state_dict", {"device": "cuda"}, ["fsdp2-pinned-policy-half-moved"]),
        ("fsdp2/policy/staged/state_dict", {"device": "cpu"}, ["ok"]),
        ("fsdp2/none/staged/summon_full_params", {"device": "cpu"}, ["summon-full-params-noop-on-fsdp2"]),
        # torch.
        ("fsdp2/policy/staged/state_dict", {"torch": "2.8.1"}, ["ok"]),
        ("fsdp2/policy/staged/state_dict", {"torch": ""}, ["fsdp2-pinned-policy-half-moved"]),
        # Ranks: three make every shard uneven, one makes FSDP1 NO_SHARD.
        ("fsdp2/none/unstaged/from_local", {"world_size": 2}, ["ok"]),
        ("fsdp2/none/unstaged/from_local", {"world_size": 3}, ["uneven-from-local-rebuild"]),
        ("fsdp2/none/unstaged/from_local", {"world_size": 3, "device": "cpu"}, ["uneven-from-local-over-gloo"]),
        ("fsdp2/none/unstaged/from_local", {"world_size": 8}, ["ok"]),
        ("fsdp2/none/unstaged/uneven/from_local", {"world_size": 2}, ["uneven-from-local-rebuild"]),
        ("fsdp2/none/unstaged/uneven/from_local", {"world_size": 1}, ["ok"]),
        ("fsdp1/policy/unstaged/state_dict", {"world_size": 2}, ["ok"]),
        ("fsdp1/policy/unstaged/state_dict", {"world_size": 1}, ["fsdp1-size1-policy-keeps-the-model"]),
        ("fsdp1/policy/unstaged/size1/state_dict", {"world_size": 2}, ["fsdp1-size1-policy-keeps-the-model"]),
        ("fsdp1/policy/unstaged/fresh/state_dict", {"world_size": 1}, ["ok"]),
        ("fsdp1/none/unstaged/full_state_dict.rank0+cpu", {"world_size": 1}, ["fsdp1-size1-ignores-offload-to-cpu"]),
        ("fsdp1/none/unstaged/local_state_dict", {"world_size": 1}, ["ok"]),
        ("fsdp1/param/unstaged/local_state_dict", {"world_size": 1}, ["fsdp1-manual-offload-then-state-dict"]),
        ("fsdp1/none/unstaged/size1/get_optimizer_state_dict", {"world_size": 1}, ["ok"]),
        (
            "fsdp1/none/unstaged/size1/get_optimizer_state_dict",
            {"world_size": 2},
            ["fsdp1-optimizer-state-of-a-subgroup"],
        ),
        # A race: certain where copies are late, perhaps on an accelerator, never where they finish at once.
        ("fsdp2/param/unstaged/nonblocking/state_dict", {}, ["non-blocking-d2h-read-too-early"]),
        ("fsdp2/param/unstaged/nonblocking/state_dict", {"device": "cuda"}, ["non-blocking-d2h-read-too-early", "ok"]),
        ("fsdp2/param/unstaged/nonblocking/state_dict", {"late_completion": False}, ["ok"]),
        (
            "fsdp1/optimizer/unstaged/size1/nonblocking/get_optimizer_state_dict",
            {"world_size": 1, "device": "cuda"},
            ["nonblocking-offload-optimizer-state-unsharded", "fsdp1-size1-optimizer-state-on-cpu"],
        ),
        # What a method of the user's own does is not known for certain.
        ("fsdp1/policy/unstaged/module:function", {"world_size": 1}, ["fsdp1-size1-policy-keeps-the-model", "ok"]),
        # Loads.
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
def test_what_is_expected_depends_on_torch_device_and_ranks(
    case_id: str, context: dict[str, object], expected: list[str]
) -> None:
    assert _ids(case_id, **context) == expected


def test_nothing_that_offloading_causes_is_expected_on_the_cpu() -> None:
    context = RunContext(device="cpu")
    cases = select(Selection(directions=("out",), level="full", fix=True))
    expected = {entry.id for case in cases for entry in list_expected_failures(case, context)}
    assert expected == {
        "summon-full-params-noop-on-fsdp2",
        "hidden-experts-taken-for-all",
        "uneven-from-local-over-gloo",
        "merged-lora-read-late",
        "layered-summon-collects-nothing",
        "unshard-leaves-tensor-parallel-shards",
        "quantized-codes-as-weights",
        "async-save-of-a-tensor-subclass-is-not-written",
        "unshard-shows-float8",
        "dcp-load-refuses-a-tensor-subclass",
    }


def test_every_entry_of_a_race_waits_for_a_non_blocking_copy() -> None:
    races = [entry for entry in read_catalogue() if entry.race]
    assert len(races) > 3
    for entry in races:
        for trigger in entry.triggers:
            in_the_method = trigger.values["method"] == ("to_empty.broadcast",)  # It offloads after the load.
            in_the_method |= trigger.values["method"] == ("lora.merged",)  # It copies from the policy's pinned memory.
            in_the_method |= trigger.values["method"] == ("dcp.async_save.pinned",)  # It stages on a stream of its own.
            in_the_method |= "framework" in trigger.values  # It offloads as it does.
            assert in_the_method or trigger.values["transfer"] == ("nonblocking",), entry.id


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_no_failure_is_expected_of_our_loaders(world_size: int) -> None:
    cases = select(Selection(directions=("in",), level="full", methods=(LOADING_FIX, OPTIMIZER_FIX)))
    assert len(cases) > 100
    assert [
        entry.id for case in cases for entry in list_expected_failures(case, RunContext(world_size=world_size))
    ] == []


def test_every_reproduced_entry_of_loading_is_expected_somewhere_in_the_matrix() -> None:
    """Looks in the full matrix of the emulated device and of the CPU, with two ranks."""
    cases = select(Selection(directions=("in",), level="full"))
    contexts = [RunContext(device=device) for device in ("emulated", "cpu")]
    shown = {
        entry.id for context in contexts for case in cases for entry in list_expected_outcomes(case, context) if entry
    }
    expected = {entry.id for entry in read_catalogue() if entry.group == "loading" and entry.reproduced}
    assert not expected - shown
