"""Models in 4 bits, whose codes are no weights, and in 8 bits, whose weights are in a subclass of tensors."""

from __future__ import annotations

import pathlib

import pytest
from program import probe

_SCENARIO = "{strategy}/none/unstaged/qwen3-qlora/fp32-compute"
_METHODS = {
    "get_model_state_dict.full": ("wrong", "quantized-codes-as-weights"),
    "full_tensors": ("refused", ""),
    "local_shards": ("refused", ""),
    "save_full_tensors": ("refused", ""),
    "full_tensors.adapter": ("ok", ""),
    "save_optimizer_state": ("ok", ""),
}


@pytest.mark.parametrize(("device", "strategy"), [("cpu", "fsdp2"), ("emulated", "fsdp2"), ("emulated", "fsdp1")])
def test_codes_are_wrong_as_weights_and_refused_by_our_functions(
    device: str, strategy: str, tmp_path: pathlib.Path
) -> None:
    cases = [f"{_SCENARIO.format(strategy=strategy)}/{method}" for method in _METHODS]
    pytest.importorskip("bitsandbytes")
    done = probe(tmp_path, "--fix", *(word for case in cases for word in ("--case", case)), device=device)
    assert done.report is not None, done.stderr
    found = {result.case.method: result for result in done.report.results if result.id in cases}
    assert {method: (result.verdict.kind, result.known) for method, result in found.items()} == _METHODS
    # A refusal names the tensors, and every rank raises it.
    refused = [result for result in found.values() if result.verdict.kind == "refused"]
    assert all("base_layer.weight" in result.verdict.reason for result in refused)


_LOADS = {
    "dcp.load.model+optimizer": ("wrong", "codes-loaded-without-their-scales"),
    "set_model_state_dict.full": ("refused", ""),
    "load_full_tensors": ("refused", ""),
    "load_optimizer_state": ("ok", ""),
}


@pytest.mark.parametrize(
    ("scenario", "adapter"),
    [
        ("fsdp2/none/unstaged/qwen3-qlora/fresh/fp32-compute", ("ok", "")),
        ("fsdp2/policy/unstaged/qwen3-qlora-bf16/fresh", ("ok", "")),
        ("fsdp1/none/unstaged/qwen3-qlora-bf16/fresh", ("incomplete", "adapter-load-drops-every-name")),
    ],
)
def test_a_load_of_codes_is_wrong_and_of_weights_refused(
    scenario: str, adapter: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("bitsandbytes")
    expected = _LOADS | {"set_peft_model_state_dict": adapter}
    cases = [f"{scenario}/{method}" for method in expected]
    done = probe(tmp_path, "--fix", *(word for case in cases for word in ("--case", case)), device="emulated")
    assert done.report is not None, done.stderr
    found = {
        result.case.method: (result.verdict.kind, result.known) for result in done.report.results if result.id in cases
    }
    assert found == expected


@pytest.mark.parametrize(
    ("model", "of_dcp"),
    [("qwen3-float8", ("ok", "")), ("qwen3-mxfp8", ("crash", "dcp-load-refuses-a-tensor-subclass"))],
)
def test_ours_extract_8_bit_weights_right_and_async_save_loses_them(
    model: str, of_dcp: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("torchao")
    expected = {
        "dcp": of_dcp,
        "dcp.async_save": ("wrong", "async-save-of-a-tensor-subclass-is-not-written"),
        "full_tensors": ("ok", ""),
        "save_full_tensors": ("ok", ""),
    }
    cases = [f"fsdp2/policy/unstaged/{model}/{method}" for method in expected]
    done = probe(tmp_path, "--fix", *(word for case in cases for word in ("--case", case)), device="emulated")
    assert done.report is not None, done.stderr
    found = {
        result.case.method: (result.verdict.kind, result.known) for result in done.report.results if result.id in cases
    }
    assert found == expected
