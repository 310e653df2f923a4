"""How many nodes and devices a configuration says, and any other number of it that counts something. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_doctor.check.frameworks.framework import Keys
from fsdp_doctor.check.launch_commands import ENVIRONMENT, SECTION
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.report.layout import counted

DEFAULT_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class _MachineKeys:
    """Where a framework's settings give them. ranks: of all nodes together. words: whether others than numbers can
    stand there."""

    gpus: Keys = ()
    nodes: Keys = ()
    ranks: Keys = ()
    words: bool = False


_KEYS: Mapping[str, _MachineKeys] = {
    "verl": _MachineKeys(gpus=("trainer.n_gpus_per_node",), nodes=("trainer.nnodes",)),
    "SkyRL": _MachineKeys(
        gpus=("trainer.placement.policy_num_gpus_per_node",), nodes=("trainer.placement.policy_num_nodes",)
    ),
    "NeMo-RL": _MachineKeys(gpus=("cluster.gpus_per_node",), nodes=("cluster.num_nodes",)),
    "prime-rl": _MachineKeys(gpus=("deployment.gpus_per_node",), nodes=("deployment.num_train_nodes",)),
    "AReaL": _MachineKeys(gpus=("cluster.n_gpus_per_node",), nodes=("cluster.n_nodes",)),
    "Lightning": _MachineKeys(gpus=("trainer.devices",), nodes=("trainer.num_nodes",), words=True),
    "axolotl": _MachineKeys(gpus=("nproc_per_node",), nodes=("num_machines", "nnodes"), ranks=("num_processes",)),
    "accelerate": _MachineKeys(nodes=("num_machines",), ranks=("num_processes",)),
}
_LAUNCHED_GPUS = (
    *(f"{SECTION}.{name}" for name in ("nproc_per_node", "num_gpus", "gpus_per_node")),
    f"{ENVIRONMENT}.NPROC_PER_NODE",
)
_LAUNCHED_NODES = (*(f"{SECTION}.{name}" for name in ("num_machines", "nnodes", "num_nodes")), f"{ENVIRONMENT}.NNODES")


def at_least_one(settings: Settings, *keys: str) -> int | None:
    """The number of the first key that is set, None where none is. Raises Unreadable for less than 1."""
    number = settings.number(*keys)
    if number is not None and number < 1:
        raise Unreadable(f"{settings.first(*keys)} must be at least 1")
    return number


def configured_machines(framework: str, settings: Settings, ranks: int | None) -> tuple[int | None, int]:
    """Devices of each node, None where nothing says them, and nodes. ranks: as ``check`` read them.

    Raises Unreadable for less than 1, and for ranks that are not as many on each node.
    """
    keys = _KEYS.get(framework, _MachineKeys())
    at_least_one(settings, *keys.ranks)
    read = _said if keys.words else at_least_one
    gpus = read(settings, *keys.gpus) or _said(settings, *_LAUNCHED_GPUS)
    nodes = read(settings, *keys.nodes) or _said(settings, *_LAUNCHED_NODES)
    if ranks is None:
        return gpus, nodes or 1
    if nodes and not gpus and ranks % nodes:
        raise Unreadable(f"{counted(ranks, 'rank')} cannot be as many on each of {counted(nodes, 'node')}")
    nodes = -(-ranks // gpus) if gpus else nodes or -(-ranks // DEFAULT_GPUS)
    return -(-ranks // nodes), nodes


def _said(settings: Settings, *keys: str) -> int | None:
    """As ``Settings.count`` has it. Words such as gpu, auto or -1, and a variable of the shell, say none."""
    count = settings.count(*keys)
    if count is not None and count < 1:
        raise Unreadable(f"{settings.first(*keys)} must be at least 1")
    return count
