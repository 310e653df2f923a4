"""Each consumer finds a fault that a reader of one entry after the other does not."""

from __future__ import annotations

import pytest
from program import Run, probe

_VERDICTS = {
    # Kept to the end in the second call, as a function that promises nothing else must allow.
    "faults.consumers:reuses_a_buffer": "wrong",
    "keeps-views/faults.consumers:reuses_a_buffer": "wrong",
    "second-group/faults.consumers:reuses_a_buffer": "wrong",
    "second-group/faults.consumers:reuses_a_buffer_and_says_so": "ok",
    "faults.consumers:yields_what_another_stream_writes": "ok",
    "packed/faults.consumers:yields_what_another_stream_writes": "race",
    "packed/faults.consumers:leaves_the_others_waiting": "ok",
    "packed/faults.consumers:honest": "race",
    "packed/faults.consumers:gathers_at_the_call": "unsupported",
    "keeps-views/faults.consumers:reuses_a_buffer_and_says_so": "unsupported",
    "faults.consumers:reuses_a_buffer_and_says_so": "ok",
    "second-group/faults.consumers:yields_a_tensor_twice": "wrong",
    "packed/faults.consumers:yields_a_tensor_twice": "wrong",
    "shared-device/faults.consumers:leaves_the_others_waiting": "order",
    "shared-device/faults.consumers:gathers_ahead": "order",
    "shared-device/faults.consumers:gathers_in_step": "ok",
    "lazy/faults.consumers:returns_the_buffers_of_the_last_call": "wrong",
    "lazy/full_tensors": "ok",
    "repeated/faults.consumers:leaves_the_others_waiting": "ok",
    "repeated/faults.consumers:keeps_host_memory": "leak",
    "repeated/faults.consumers:keeps_a_descriptor": "leak",
    "repeated/faults.consumers:makes_a_stream": "leak",
    "repeated/full_tensors": "ok",
    "dies/full_tensors": "ok",
    "step-in-flight/parameters.full_tensor": "race",
    "step-in-flight/full_tensors": "ok",
    "colocated/full_tensors": "ok",
    "slow/full_tensors": "ok",
    "stops/faults.consumers:leaves_the_others_waiting": "hang",
    "stops/full_tensors": "ok",
    "raises/full_tensors": "ok",
    "qwen3-buffers/state_dict.to.full_tensor": "ok",
    "qwen3-buffers/in-place/state_dict.to.full_tensor": "poisoned",
    "qwen3-buffers/in-place/full_tensors": "ok",
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cases = [word for name in _VERDICTS for word in ("--case", f"fsdp2/none/unstaged/{name}")]
    return probe(tmp_path_factory.mktemp("probed"), *cases, device="emulated")


@pytest.mark.parametrize("name", _VERDICTS)
def test_a_consumer_finds_what_a_reader_of_each_entry_does_not(probed: Run, name: str) -> None:
    verdict = probed.result(f"fsdp2/none/unstaged/{name}").verdict
    assert verdict.kind == _VERDICTS[name], verdict


def test_a_receiver_ends_with_the_run(probed: Run) -> None:
    assert probed.left == []
