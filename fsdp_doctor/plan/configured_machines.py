"""How many nodes and devices a configuration says, and any other number of it that counts something. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_doctor.check.frameworks.framework import Keys
from fsdp_doctor.check.launch_commands import ENVIRONMENT, SECTION
from fsdp_doctor.check.settings import Settings, Unreadable

_DEFAULT_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class _MachineKeys:
    """Where a framework's settings give them. ranks: of all nodes together."""

    gpus: Keys = ()
    nodes: Keys = ()
    ranks: Keys = ()


_KEYS: Mapping[str, _MachineKeys] = {
    "verl": _MachineKeys(gpus=("trainer.n_gpus_per_node",), nodes=("trainer.nnodes",)),
    "SkyRL": _MachineKeys(
        gpus=("trainer.placement.policy_num_gpus_per_node",), nodes=("trainer.placement.policy_num_nodes",)
    ),
    "NeMo-RL": _MachineKeys(gpus=("cluster.gpus_per_node",), nodes=("cluster.num_nodes",)),
    "prime-rl": _MachineKeys(gpus=("deployment.gpus_per_node",), nodes=("deployment.num_train_nodes",)),
    "accelerate": _MachineKeys(nodes=("num_machines",), ranks=("num_processes",)),
}
_LAUNCHED_GPUS = (
    *(f"{SECTION}.{name}" for name in ("nproc_per_node", "num_gpus", "gpus_per_node")),
    f"{ENVIRONMENT}.NPROC_PER_NODE",
)
_LAUNCHED_NODES = (f"{SECTION}.num_machines",)


def at_least_one(settings: Settings, *keys: str) -> int | None:
    """The number of the first key that is set, None where none is. Raises Unreadable for less than 1."""
    number = settings.number(*keys)
    if number is not None and number < 1:
        raise Unreadable(f"{settings.first(*keys)} must be at least 1")
    return number


def configured_machines(framework: str, settings: Settings, ranks: int | None) -> tuple[int, int]:
    """Devices of each node, and nodes. ranks: as ``check`` read them. Raises Unreadable for less than 1."""
    keys = _KEYS.get(framework, _MachineKeys())
    at_least_one(settings, *keys.ranks)
    gpus = at_least_one(settings, *keys.gpus) or _launched(settings, _LAUNCHED_GPUS)
    nodes = at_least_one(settings, *keys.nodes) or _launched(settings, _LAUNCHED_NODES)
    if ranks is None:
        return gpus or _DEFAULT_GPUS, nodes or 1
    if gpus is not None:
        gpus = min(gpus, ranks)
        return gpus, -(-ranks // gpus)
    nodes = nodes or -(-ranks // _DEFAULT_GPUS)
    return -(-ranks // nodes), nodes


def _launched(settings: Settings, keys: Keys) -> int | None:
    """A launch command can have words there, such as gpu or a variable of the shell, which say no number."""
    row = settings.first(*keys)
    is_number = row is not None and str(row.value).removeprefix("-").isdecimal()
    return at_least_one(settings, *keys) if is_number else None
