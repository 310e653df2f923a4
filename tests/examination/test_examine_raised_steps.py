"""``examine`` after a step that raised: the finding, and its remedy carried out to two right steps."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.extraction import tensors_of
from support.ranks import Setting, of_all_ranks, on_ranks, this_device, together
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffload, FSDPModule

from fsdp_doctor import examine, load_full_tensors, save_full_tensors
from fsdp_doctor.examination.examine import Finding

everywhere = on_ranks(Setting("emulated", 2), Setting("cpu", 2))
on_the_device = on_ranks(Setting("emulated", 2))


def find(job: Job, kind: str) -> Finding | None:
    return next((finding for finding in examine(job.model, job.optimizer).findings if finding.kind == kind), None)


@everywhere
def test_the_remedy_for_a_raised_step_of_fsdp2_leads_to_right_steps() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has no reset_iter_state")
    for part, severity in (("forward", "hazard"), ("backward", "bad")):
        for name in ("0", "1", "2.up", "3"):
            job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
            job.raise_in(name, part)  # type: ignore[arg-type]
            finding = find(job, "step-open")
            assert finding is not None
            assert finding.severity == severity
            job.model.zero_grad()
            job.model.reset_iter_state()
            assert find(job, "step-open") is None
            assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_raised_forward_of_fsdp1_leads_to_right_steps() -> None:
    for offload in (None, CPUOffload(offload_params=True)):
        for original in (False, True):
            wrap = lambda net: wrap_fsdp1(net, cpu_offload=offload, use_orig_params=original)  # noqa: B023, E731
            job, twin = Job(wrap), Job(wrap)
            job.raise_in("2", "forward")
            finding = find(job, "step-open")
            assert finding is not None
            assert finding.severity == "hazard"
            job.compute_loss().backward()
            job.optimizer.zero_grad()
            assert find(job, "step-open") is None
            assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_raised_backward_of_fsdp1_leads_to_right_steps() -> None:
    for original in (False, True):
        wrap = lambda net: wrap_fsdp1(net, use_orig_params=original)  # noqa: B023, E731
        job, twin = Job(wrap), Job(wrap)
        job.raise_in("2", "backward")
        finding = find(job, "step-open")
        assert finding is not None
        assert finding.bad
        with tempfile.TemporaryDirectory() as own:
            directory = of_all_ranks(own)[0]
            save_full_tensors(job.model, f"{directory}/saved", names="model")
            built_again = Job(wrap)
            for loaded in (built_again, twin):
                load_full_tensors(loaded.model, f"{directory}/saved")
            together()
        assert_same_steps(built_again, twin)


@everywhere
def test_the_remedy_for_a_pending_gather_leads_to_right_steps() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    job.find("1").set_modules_to_forward_prefetch([job.find("2")])
    job.find("1")(torch.ones(2, 6, device=this_device()))
    finding = find(job, "gather-pending")
    assert finding is not None
    assert set(finding.names) == {"2.up.weight", "2.up.bias", "2.down.weight"}
    job.find("2").unshard()
    job.find("2").reshard()
    assert find(job, "gather-pending") is None
    other = tensors_of(make_net(seed=5))
    for loaded in (job, twin):
        set_model_state_dict(loaded.model, dict(other), options=StateDictOptions(full_state_dict=True))
    assert_same_steps(job, twin)


@everywhere
def test_a_step_that_runs_is_no_finding() -> None:
    job = Job(wrap_fsdp2)
    seen: list[Any] = []
    hooks = [
        job.find("2").register_forward_hook(lambda *_: seen.append(find(job, "step-open"))),
        job.find("2").register_full_backward_hook(lambda *_: seen.append(find(job, "step-open"))),
    ]
    job.compute_loss().backward()
    for hook in hooks:
        hook.remove()
    assert seen == [None, None]
