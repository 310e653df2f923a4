"""How many ranks the command starts that a training is launched with."""

from __future__ import annotations

from fsdp_doctor.check.launch_commands import ENVIRONMENT, SECTION
from fsdp_doctor.check.settings import Settings

_A_NODE = ("nproc_per_node", "num_gpus", "gpus_per_node")
_NODES = ("nnodes", "num_nodes")


def launched_ranks(settings: Settings) -> int | None:
    """None where the command does not say it, as with ``--nproc_per_node gpu`` alone. Raises Unreadable."""
    if processes := settings.number(f"{SECTION}.num_processes"):
        return processes
    here = settings.first(*(f"{SECTION}.{name}" for name in _A_NODE), f"{ENVIRONMENT}.NPROC_PER_NODE")
    if here is None or str(here.value) == "cpu" or "$" in str(here.value):
        return None
    nodes = settings.first(*(f"{SECTION}.{name}" for name in _NODES), f"{ENVIRONMENT}.NNODES")
    if nodes is not None and (":" in str(nodes.value) or "$" in str(nodes.value)):
        return None
    per_node = _visible(settings) if str(here.value) in ("gpu", "auto") else settings.number(here.key)
    return per_node * (settings.number(nodes.key) or 1 if nodes else 1) if per_node else None


def _visible(settings: Settings) -> int | None:
    """The devices that the command leaves to be seen; each is a number or a name."""
    row = settings.first(f"{ENVIRONMENT}.CUDA_VISIBLE_DEVICES")
    if row is None or "$" in str(row.value):
        return None
    return sum(bool(name.strip()) for name in str(row.value).split(","))
