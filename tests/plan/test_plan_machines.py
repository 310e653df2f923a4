"""How many devices and nodes are planned, and how many of them share a model."""

from __future__ import annotations

import pathlib

import pytest
from support.places import TESTS

from fsdp_doctor.errors import UsageError
from fsdp_doctor.plan.job import JobSetup, PlanOptions, read_job

_CONFIGS = TESTS / "check" / "configs"
_AREAL = ("actor.path=small", "actor.fsdp.offload_params=false")
_APART = "policy.generation.colocated.enabled=false"
_RESOURCES = "policy.generation.colocated.resources"


def _planned(*config: str, nodes: int | None = None) -> JobSetup:
    return read_job(config, PlanOptions(model="small", nodes=nodes, gpu_memory=1 << 30))


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
    sentence = "the configuration does not say how many devices a node has, and 8 are taken: give --gpus"
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
    with pytest.raises(UsageError, match="3 ranks cannot be as many on each of 2 nodes"):
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
    ],
)
def test_areal_trains_on_as_many_nodes_as_its_allocation_needs(
    cluster: tuple[int, int], backend: str, expected: tuple[int, int]
) -> None:
    settings = (f"cluster.n_gpus_per_node={cluster[0]}", f"cluster.n_nodes={cluster[1]}", f"actor.backend={backend}")
    assert _machines(*_AREAL, *settings) == expected


def test_an_allocation_of_areal_without_numbers_has_the_cluster() -> None:
    settings = ("cluster.n_gpus_per_node=4", "cluster.n_nodes=2", "actor.backend=fsdp")
    assert _machines(*_AREAL, *settings) == (4, 2)


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
