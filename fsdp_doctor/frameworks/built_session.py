"""Compares the model that a framework built with its configuration.

Without this check, a version that ignores a setting would be judged by a configuration that never ran: transformers
4.57.6 silently drops ``version``, ``state_dict_type`` and ``cpu_offload`` of ``fsdp_config``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.distributed.tensor import DTensor

from fsdp_doctor.case import models
from fsdp_doctor.case.built_scenario import list_policies, recognize_strategy
from fsdp_doctor.frameworks.adapter import FrameworkSession
from fsdp_doctor.matrix.frameworks.framework_matrix import ConfiguredBuild
from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import reader


def find_mismatches(session: FrameworkSession, builds: Iterable[ConfiguredBuild]) -> Iterator[str]:
    """Yields a phrase for each property of the wrapped model that differs from the configuration.

    Local to a rank: no communication.
    """
    contents = reader.read(session.model)
    strategy = recognize_strategy(contents)
    offloads = {policy != "none" for policy in list_policies(contents)}
    num_units = len(contents.fsdp1_units) + len(contents.fsdp2_units)
    builds = list(builds)
    if any(asked.own_sharding for asked in builds):
        plain = [each.names[0] for each in contents.parameters if not isinstance(each.tensor, DTensor)]
        if plain:
            yield f"parameters that are no DTensors under the framework's own sharding: {join_some(plain)}"
        if num_units:
            yield f"{num_units} units of torch's FSDP instead of the framework's own sharding"
    elif num_units <= models.NUM_LAYERS:
        yield f"{num_units} FSDP units, but the root and each of {models.NUM_LAYERS} layers must be a unit"
    for asked in builds:
        if asked.strategies and strategy not in asked.strategies:
            yield f"{strategy} instead of {' or '.join(asked.strategies)}"
        if asked.offloads is not None and offloads != {asked.offloads}:
            yield f"{_name_policy(offloads)} instead of {_name_policy({asked.offloads})}"
        if asked.state_dict_type and session.state_dict_type not in (None, asked.state_dict_type):
            yield f"{session.state_dict_type} instead of {asked.state_dict_type} state dicts"


def _name_policy(offloads: set[bool]) -> str:
    match sorted(offloads):
        case [True]:
            return "an offload policy"
        case [False]:
            return "no offload policy"
        case _:
            return "an offload policy in some units"
