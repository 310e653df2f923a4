"""How many devices and nodes are planned, and how many of them share a model."""

from __future__ import annotations

import pathlib

import pytest
from support.places import TESTS

from fsdp_doctor.errors import UsageError
from fsdp_doctor.plan.job_setup import JobSetup
from fsdp_doctor.plan.planned_job import PlanOptions, planned_job

_CONFIGS = TESTS / "check" / "configs"
_AREAL = ("actor.path=small", "actor.fsdp.offload_params=false")
_APART = "policy.generation.colocated.enabled=false"
_RESOURCES = "policy.generation.colocated.resources"


def _planned(*config: str, nodes: int | None = None) -> JobSetup:
    return planned_job(config, PlanOptions(model="small", nodes=nodes, gpu_memory=1 << 30))


def _machines(*config: str, nodes: int | None = None) -> tuple[int, int]:
    machines = _planned(*config, nodes=nodes).machines
    return machines.gpus, machines.nodes


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ("{devices: 4, num_nodes: 2}", (4, 2)),
        ("{devices: [0, 1, 2], num_nodes: 2}", (3, 2)),
        ("{devices: auto, num_nodes: 2}", (8, 2)),
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


def test_no_devices_of_lightning_are_refused() -> None:
    with pytest.raises(UsageError, match=r"trainer\.devices=0 .* must be at least 1"):
        _planned("trainer.strategy=fsdp", "trainer.devices=0")


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
