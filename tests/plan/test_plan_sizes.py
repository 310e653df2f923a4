"""How much is computed at once, and that it is said where the configuration does not."""

from __future__ import annotations

from fsdp_doctor.plan.job import JobSetup, PlanOptions, read_job

_ACTOR = "actor_rollout_ref.actor"
_VERL = (f"{_ACTOR}.strategy=fsdp2", "algorithm.adv_estimator=gae", "data.max_prompt_length=1024")


def _planned(*settings: str, sequences: int | None = None) -> JobSetup:
    return read_job((*_VERL, *settings), PlanOptions(model="small", gpu_memory=1 << 30, sequences=sequences))


def test_a_default_that_is_taken_is_said_with_the_option_that_replaces_it() -> None:
    actor, critic = _planned("data.max_response_length=1024").unread
    assert actor.startswith("actor: the configuration does not say how much is computed at once")
    assert actor.endswith("give --micro-batch")
    assert critic.startswith("critic: ")


def test_nothing_is_said_where_the_configuration_or_an_option_says_it() -> None:
    micro_batches = (f"{_ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2")
    assert _planned(*micro_batches).unread == ()
    assert _planned(sequences=2).unread == ()


def test_a_critic_that_is_filled_up_has_twice_the_tokens_of_an_actor_by_default_as_in_verl() -> None:
    actor, critic = _planned(f"{_ACTOR}.use_dynamic_bsz=true", "data.max_response_length=1024").roles
    assert critic.sequences * critic.length == 2 * actor.sequences * actor.length == 32768
