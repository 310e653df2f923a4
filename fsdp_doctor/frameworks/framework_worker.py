"""What a framework finds in a worker: torchrun's variables, a store, directories of its own, and the shims, if any."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_doctor.case import runtime
from fsdp_doctor.frameworks import installed
from fsdp_doctor.frameworks.installed import adapter_of, why_unavailable
from fsdp_doctor.frameworks.shimming import Shimming
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.environment import USERS_HOME
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName

# What says where a network is, or how to get in.
_OF_NETWORK = ("hf_endpoint", "hf_token", "hugging_face_hub_token", "wandb_api_key", "http_proxy", "https_proxy")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
}
_CACHES = ("HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_DIRECTORIES = (*_CACHES, "XDG_CONFIG_HOME", "XDG_DATA_HOME")


@dataclass(frozen=True, kw_only=True)
class FrameworkWorker:
    """One rank's worker for one framework.

    scratch: a directory that the run may write to, the same on every rank.
    """

    framework: FrameworkName
    place: Place
    device: torch.device
    scratch: pathlib.Path


def environment(scratch: pathlib.Path, frameworks: Iterable[FrameworkName]) -> dict[str, str]:
    """This process's, with a home and caches below ``scratch``, without variables of networks and of the frameworks."""
    home = scratch / "home"
    home.mkdir(parents=True, exist_ok=True)
    prefixes = tuple(prefix for name in frameworks for prefix in adapter_of(name).matrix.own_variables)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and name.lower() not in _OF_NETWORK
    }
    own = {"HOME": str(home), USERS_HOME: os.path.expanduser("~")}
    return kept | _OFFLINE | own | {name: str(home / name.lower()) for name in _DIRECTORIES}


def preload(frameworks: Iterable[FrameworkName], scratch: pathlib.Path, seconds: float) -> None:
    """Imports frameworks in the environment in which they will run, for the process that workers are forked from."""
    before = dict(os.environ)
    for framework in frameworks:
        _replace_environment(environment(scratch, [framework]))
        try:
            installed.preload(framework, seconds)
        finally:
            _replace_environment(before)


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ |= variables


def start(
    framework: FrameworkName, place: Place, run_device: RunDevice, scratch: pathlib.Path, store: dist.Store
) -> FrameworkWorker:
    """Sets a worker up for a framework that makes its process groups itself. Every rank must call it.

    store: over which the ranks find the store that they give the framework, of this generation alone.
    """
    device = runtime.device_of(place, run_device)
    _replace_environment(environment(scratch, [framework]))
    os.environ |= _store_variables(place, store)
    if device.type == "cuda":
        runtime.wait_for_cuda_without_spinning(place.local_rank)
    runtime.set_up_device(device, run_device)
    if device.type == "emulated" and not why_unavailable(framework):
        torch.get_device_module(device).set_device(device)
        adapter = adapter_of(framework)
        with Shimming(adapter.matrix) as shims:
            adapter.on_emulated(shims)
    return FrameworkWorker(framework=framework, place=place, device=device, scratch=scratch)


# Rank 0's serves as long as its worker lives.
_served: list[dist.TCPStore] = []


def _store_variables(place: Place, store: dist.Store) -> Mapping[str, str]:
    """torchrun's variables for a store that nobody has used yet, which rank 0 serves on a free port."""
    if place.rank == 0:
        _served.append(dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False))
        store.set("port", str(_served[-1].port))
    return {"MASTER_PORT": store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
