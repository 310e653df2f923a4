"""Tests what the axes precision and context change of a case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from program import Run, probe
from torch import nn

from fsdp_doctor.case.methods.lookup import MethodArguments, run_in_context
from fsdp_doctor.matrix.axes import Context

_MODES: dict[Context, tuple[bool, bool]] = {
    "ordinary": (True, False),
    "no_grad": (False, False),
    "inference": (False, True),
}
_GIVEN = MethodArguments(model=nn.Identity(), device=torch.device("cpu"))


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _yields(given: MethodArguments) -> Iterator[tuple[bool, bool]]:
    yield _mode()
    yield _mode()


def _returns_what_yields(given: MethodArguments) -> Any:
    called_in = _mode()
    return (mode for mode in (called_in, _mode()))


@pytest.mark.parametrize("context", list(_MODES))
@pytest.mark.parametrize("function", [_yields, _returns_what_yields])
def test_a_method_and_its_iterator_run_in_the_context_and_callers_outside(function: Any, context: Context) -> None:
    for mode in run_in_context(context, function)(_GIVEN):
        assert mode == _MODES[context]
        assert _mode() == _MODES["ordinary"]
    assert _mode() == _MODES["ordinary"]


def test_what_a_method_returns_whole_is_handed_on_as_it_is() -> None:
    mapping = {"weight": torch.ones(1)}
    assert run_in_context("inference", lambda given: mapping)(_GIVEN) is mapping


def test_an_exception_inside_of_the_context_leaves_it() -> None:
    def fails(given: MethodArguments) -> Iterator[int]:
        yield 1
        raise KeyError("planted")

    entries = run_in_context("inference", fails)(_GIVEN)
    assert next(entries) == 1
    with pytest.raises(KeyError):
        next(entries)
    assert _mode() == _MODES["ordinary"]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    ids = [
        "fsdp2/none/unstaged/unshard",
        "fsdp2/none/unstaged/fp32-compute/unshard",
        "fsdp2/none/unstaged/no_grad/state_dict",
        "fsdp2/none/unstaged/inference/state_dict",
        "fsdp1/none/unstaged/fresh/no_grad/set_model_state_dict.full",
        "fsdp1/none/unstaged/fresh/inference/set_model_state_dict.full",
    ]
    options = [word for case_id in ids for word in ("--case", case_id)]
    return probe(tmp_path_factory.mktemp("probed"), *options, device="emulated")


def test_without_mixed_precision_a_unit_is_gathered_as_its_shards_are(probed: Run) -> None:
    for words, dtype in (("unstaged/unshard", "bfloat16"), ("fp32-compute/unshard", "float32")):
        result = probed.result(words)
        assert result.verdict.kind == "ok"
        assert {kind.split()[1] for counts in result.yielded for kind in counts} == {dtype}


def test_a_way_out_that_inference_mode_breaks_works_without_gradients(probed: Run) -> None:
    assert probed.kind("no_grad/state_dict") == "ok"
    assert probed.kind("inference/state_dict") == "crash"


def test_a_load_in_inference_mode_poisons_the_next_step(probed: Run) -> None:
    assert probed.kind("no_grad/set_model_state_dict.full") == "ok"
    result = probed.result("inference/set_model_state_dict.full")
    assert result.verdict.kind == "poisoned"
    record = result.ranks[0].record
    assert record is not None
    assert (record.stage, record.problems) == ("next step", ())
