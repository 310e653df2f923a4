"""What the plan reads of a configuration needs no torch; shapes do."""

from __future__ import annotations

from program import python_prints

_VERL = [
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo",
]


def test_the_configuration_is_read_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fsdp_doctor.plan.job import PlanOptions, read_job\n"
        f"job = read_job({_VERL!r}, PlanOptions(model='small', gpu_memory=1))\n"
        "print([role.role for role in job.roles], job.engine.utilization)"
    )
    assert python_prints(code).strip() == "['actor', 'ref'] 0.5"
