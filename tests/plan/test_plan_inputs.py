"""Tests what the plan reads of a configuration: devices and nodes, shard groups, and how much is computed at once."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from program import python_prints
from support.places import TESTS

from fsdp_doctor.check.framework import Framework
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import make_scenario
from fsdp_doctor.plan.configured_job import PlanKeys, PlanOptions, read_job
from fsdp_doctor.plan.job import JobSetup, RoleSetup

_CONFIGS = TESTS / "check" / "configs"
_AREAL = ("actor.path=small", "actor.fsdp.offload_params=false")
_APART = "policy.generation.colocated.enabled=false"
_RESOURCES = "policy.generation.colocated.resources"
_ACTOR = "actor_rollout_ref.actor"
_VERL = (f"{_ACTOR}.strategy=fsdp2", "algorithm.adv_estimator=gae", "data.max_prompt_length=1024")


def _planned(*config: str, nodes: int | None = None, sequences: int | None = None) -> JobSetup:
    return read_job(config, PlanOptions(model="small", nodes=nodes, gpu_memory=1 << 30, sequences=sequences))


def _machines(*config: str, nodes: int | None = None) -> tuple[int, int]:
    machines = _planned(*config, nodes=nodes).machines
    return machines.gpus, machines.nodes


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ("{devices: 4, num_nodes: 2}", (4, 2)),
        ("{devices: [0, 1, 2], num_nodes: 2}", (3, 2)),
        ("{devices: '0,1', num_nodes: '2'}", (2, 2)),
        ("{devices: '2'}", (2, 1)),
        ("{devices: '2,'}", (1, 1)),
        ("{devices: auto, num_nodes: 2}", (8, 2)),
        ("{devices: '-1', num_nodes: 2}", (8, 2)),
        ("{devices: -1, num_nodes: 2}", (8, 2)),
        ("{num_nodes: 3}", (8, 3)),
        ("{devices: 2}", (2, 1)),
    ],
)
def test_lightning_says_devices_and_nodes_each_alone(
    trainer: str, expected: tuple[int, int], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "lightning.yaml"
    file.write_text(f"trainer: {trainer}\n")
    assert _machines(str(file), "trainer.strategy=fsdp") == expected


@pytest.mark.parametrize("devices", ["0", "[]", "-2"])
def test_no_devices_of_lightning_are_refused(devices: str) -> None:
    with pytest.raises(UsageError, match=r"trainer\.devices="):
        _planned("trainer.strategy=fsdp", f"trainer.devices={devices}")


def test_a_number_of_devices_that_nothing_says_is_said_to_be_taken() -> None:
    sentence = "the configuration does not say how many devices a node has, so 8 are assumed: give --gpus"
    assert sentence in _planned("trainer.strategy=fsdp", "trainer.devices=auto").unread
    assert sentence not in _planned("trainer.strategy=fsdp", "trainer.devices=8").unread


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("accelerate launch --use_fsdp --num_processes 6 --num_machines 2 t.py", (3, 2)),
        ("torchrun --nproc_per_node 4 --nnodes 2 t.py --output_dir out --fsdp full_shard", (4, 2)),
        ("torchrun --nproc_per_node auto --nnodes 2 t.py --output_dir out --fsdp full_shard", (8, 2)),
        ("CUDA_VISIBLE_DEVICES=1,3 torchrun --nproc_per_node gpu t.py --output_dir out --fsdp full_shard", (2, 1)),
    ],
)
def test_a_command_says_devices_and_nodes(command: str, expected: tuple[int, int], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(command)
    assert _machines(str(file)) == expected


def test_ranks_that_are_not_as_many_on_each_node_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks cannot be divided evenly over 2 nodes"):
        _planned("distributed_type=FSDP", "num_processes=3", "num_machines=2", "fsdp_config.fsdp_version=2")


@pytest.mark.parametrize(("word", "expected"), [("NO_SHARD", (1, 8)), ("HYBRID_SHARD", (4, 2)), ("FULL_SHARD", (8, 1))])
def test_lightnings_word_for_sharding_decides_how_many_ranks_share_the_model(
    word: str, expected: tuple[int, int]
) -> None:
    strategy = ("class_path=lightning.pytorch.strategies.FSDPStrategy", f"init_args.sharding_strategy={word}")
    settings = [f"trainer.strategy.{one}" for one in strategy]
    (role,) = _planned(*settings, "trainer.devices=4", "trainer.num_nodes=2").roles
    assert (role.shard_ranks, role.replicas) == expected


@pytest.mark.parametrize(
    ("cluster", "backend", "expected"),
    [
        ((8, 1), "fsdp:d8", (8, 1)),
        ((8, 4), "fsdp:d16", (8, 2)),
        ((8, 2), "fsdp:d4", (4, 1)),
        ((8, 2), "fsdp:d12", (6, 2)),
        ((4, 2), "fsdp", (4, 2)),
    ],
)
def test_areal_trains_on_as_many_nodes_as_its_allocation_needs(
    cluster: tuple[int, int], backend: str, expected: tuple[int, int]
) -> None:
    settings = (f"cluster.n_gpus_per_node={cluster[0]}", f"cluster.n_nodes={cluster[1]}", f"actor.backend={backend}")
    assert _machines(*_AREAL, *settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), (4, 2)),
        ((_APART, f"{_RESOURCES}.num_nodes=1", f"{_RESOURCES}.gpus_per_node=4"), (4, 1)),
        (("cluster.num_nodes=8", _APART, f"{_RESOURCES}.num_nodes=5"), (4, 3)),
        (("cluster.num_nodes=1", _APART, f"{_RESOURCES}.gpus_per_node=3"), (1, 1)),
    ],
)
def test_what_generates_apart_in_nemo_rl_is_not_the_trainers(
    settings: tuple[str, ...], expected: tuple[int, int]
) -> None:
    assert _machines(str(_CONFIGS / "nemo_rl.yaml"), "policy.generation.backend=vllm", *settings) == expected


def test_an_option_for_nodes_is_of_the_trainers_nodes() -> None:
    apart = (_APART, f"{_RESOURCES}.num_nodes=1")
    assert _machines(str(_CONFIGS / "nemo_rl.yaml"), *apart, nodes=3) == (4, 3)


def test_a_default_size_is_said_with_the_option_that_replaces_it() -> None:
    actor, critic = _planned(*_VERL, "data.max_response_length=1024").unread[:2]
    assert actor.startswith("actor: ")
    assert actor.endswith("give --micro-batch")
    assert critic.startswith("critic: ")


def test_nothing_is_said_of_sizes_that_the_configuration_or_an_option_gives() -> None:
    micro_batches = (f"{_ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2")
    assert _planned(*_VERL, *micro_batches).unread == _planned(*_VERL, sequences=2).unread == ()


def test_a_verl_critic_has_twice_the_tokens_of_an_actor() -> None:
    actor, critic = _planned(*_VERL, f"{_ACTOR}.use_dynamic_bsz=true", "data.max_response_length=1024").roles
    assert critic.sequences * critic.length == 2 * actor.sequences * actor.length == 32768


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.facts.name)
def test_the_plans_part_of_a_table_has_no_other_keys(framework: type[Framework]) -> None:
    msgspec.convert(framework.facts.plan, PlanKeys)


def test_the_configuration_is_read_without_torch() -> None:
    settings = (*_VERL, "actor_rollout_ref.rollout.name=vllm")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fsdp_doctor.plan.configured_job import PlanOptions, read_job\n"
        f"job = read_job({settings!r}, PlanOptions(model='small', gpu_memory=1))\n"
        "print([role.role for role in job.roles], job.engine.utilization)"
    )
    assert python_prints(code).strip() == "['actor', 'critic'] 0.5"


def test_an_offload_that_the_plan_does_not_know_is_refused() -> None:
    scenario = make_scenario({"strategy": "fsdp2", "offload": "partial", "staging": "unstaged"})
    with pytest.raises(UsageError, match="partial"):
        RoleSetup(role="actor", scenario=scenario, shard_ranks=2)
