"""The host of a node decides whether a job fits, by what the job is certain to hold there."""

from __future__ import annotations

from support.inside import Done, doctor

_VERL = ("actor_rollout_ref.actor.strategy=fsdp2", "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2")
_POLICY = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
_SAVES = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]")
_MODEL = ("--model", "qwen3-4b", "--layers", "4", "--seq-len", "128", "--micro-batch", "1")


def _plan(*settings: str, host: str) -> Done:
    config = [word for one in (*_VERL, *settings) for word in ("--config", one)]
    return doctor("memory", "plan", *config, *_MODEL, "--host-memory", host)


def test_a_way_to_load_or_save_that_nobody_configured_does_not_decide() -> None:
    done = _plan(host="8GiB")
    assert done.code == 0, done.stderr
    certain, _, hypothetical = done.stdout.partition("And if it is loaded or saved so")
    assert "does not fit" not in certain
    assert "rank 0 gathers a full state dict  would not fit" in hypothetical
    assert "every rank loads the checkpoint  would not fit" in hypothetical


def test_a_checkpoint_that_is_gathered_on_rank_0_decides() -> None:
    done = _plan(*_SAVES, host="8GiB")
    assert done.code == 1
    certain = done.stdout.partition("And if it is loaded or saved so")[0]
    assert "rank 0 gathers a full state dict  does not fit" in certain
    assert "The host does not hold it: rank 0 gathers a full state dict." in done.stdout


def test_less_offload_is_told_where_only_the_host_is_too_small() -> None:
    done = _plan(_POLICY, host="10GiB")
    assert done.code == 1
    assert "The host does not hold it: offloaded." in done.stdout
    assert "  actor: no offload: then " in done.stdout


def test_where_nothing_helps_the_nearest_are_told_by_what_the_host_lacks() -> None:
    done = _plan(_POLICY, host="5GiB")
    nearest = done.stdout.partition("No one setting makes it fit; the nearest:\n")[2]
    assert nearest.startswith("  actor: no offload: then 6.0 GiB in the host: offloaded; its cost: ")
