"""Sets up the worker process of a framework: environment variables, import, store, directories, and shims."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from fsdp_doctor.case import runtime
from fsdp_doctor.frameworks.adapter import Adapter, Shims
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.environment import USERS_HOME
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.text import read_first_line

# Environment variables with network addresses or credentials.
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

_unavailable: dict[str, str] = {}
# The stores that rank 0 serves as long as its worker lives.
_served: list[dist.TCPStore] = []


@dataclass(frozen=True, kw_only=True)
class FrameworkWorker:
    """One rank's worker for one framework.

    scratch: a directory of the run, the same on every rank.
    unavailable: why the framework cannot be tried here; empty if it can be tried.
    """

    framework: str
    place: Place
    device: torch.device
    scratch: pathlib.Path
    unavailable: str


def find_adapter(name: str) -> Adapter:
    """Returns the adapter of a framework without importing the framework.

    Raises every exception that the import of the adapter's module raises, and TypeError if the module has no Adapter.
    """
    place = locate_adapter(name)
    adapter = getattr(importlib.import_module(place.module), place.attribute)
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{place.module}:{place.attribute} is not an fsdp_doctor.frameworks.adapter.Adapter")
    return adapter


def describe_version(name: str) -> str:
    """Returns the name of the framework's package with its installed version, for use in a sentence."""
    package = read_matrix(name).distributions[0]
    return f"{package} {read_installed_versions([package]).get(package, '')}".strip()


def explain_unavailable(name: str) -> str:
    """Explains why the framework cannot be run here; empty if it can. Must be called after :func:`preload`."""
    return _unavailable[name]


def preload(frameworks: Iterable[str], scratch: pathlib.Path, seconds: float) -> None:
    """Imports the frameworks in the process from which workers are forked, with the workers' environment variables.

    The output of an import is dropped. If an import failed, :func:`explain_unavailable` returns the reason.

    seconds: the time limit of each import.
    """
    before = dict(os.environ)
    for framework in frameworks:
        _replace_environment(_make_environment(scratch, framework))
        try:
            package = read_matrix(framework).distributions[0]
            is_installed = bool(read_installed_versions([package]))
            _unavailable[framework] = _import(framework, seconds) if is_installed else f"{package} is not installed"
        finally:
            _replace_environment(before)


def _import(name: str, seconds: float) -> str:
    """Imports a framework. Returns the reason why it cannot be used; empty if it can."""
    try:
        with _drop_output(), _interrupt_after(seconds):
            find_adapter(name).preload()
    except BaseException as error:
        # BaseException includes SystemExit: a framework that exits during its import must not end the run.
        return f"{describe_version(name)} cannot be imported: {type(error).__name__}: {read_first_line(error)}"
    if torch.cuda.is_initialized():
        return f"{describe_version(name)} initializes CUDA during its import, and no worker can be forked afterwards"
    return ""


@contextlib.contextmanager
def _interrupt_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _drop_output() -> Iterator[None]:
    """Drops everything that is written to the file descriptors of stdout and stderr, also by native code."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def start(
    framework: str, place: Place, run_device: RunDevice, scratch: pathlib.Path, store: dist.Store
) -> FrameworkWorker:
    """Prepares a worker for a framework, which makes its process groups itself. Every rank must call it.

    store: a store that all ranks' workers share. In it, rank 0 publishes the port of the store that the framework uses.
    """
    device = runtime.choose_device(place, run_device)
    _replace_environment(_make_environment(scratch, framework))
    os.environ |= _store_variables(place, store)
    if device.type == "cuda":
        runtime.wait_for_cuda_without_spinning(place.local_rank)
    runtime.set_up_device(device, run_device)
    unavailable = explain_unavailable(framework) or _explain_impossible(place, device)
    if device.type == "emulated" and not unavailable:
        torch.get_device_module(device).set_device(device)
        unavailable = _prepare_emulated_device(framework)
    return FrameworkWorker(framework=framework, place=place, device=device, scratch=scratch, unavailable=unavailable)


def _explain_impossible(place: Place, device: torch.device) -> str:
    """Explains why no framework can be tried on this device or on several nodes; empty if one can be tried."""
    if device.type == "cpu":
        return "frameworks are run on an accelerator or on the emulated device"
    if place.num_nodes > 1:
        return "the directories that a framework saves to are not shared between the nodes"
    return ""


def _prepare_emulated_device(name: str) -> str:
    """Makes the framework find the emulated device.

    Returns the reason if the adapter cannot do so for the installed version; empty otherwise.
    """
    shims = Shims(name, read_matrix(name).shims)
    try:
        with _drop_output():
            find_adapter(name).prepare_emulated_device(shims)
    except AssertionError:
        raise  # a shim that the table does not list
    except Exception as error:
        what = f"{type(error).__name__}: {read_first_line(error)}"
        return f"the adapter cannot make {describe_version(name)} find the emulated device: {what}"
    shims.check_complete()
    return ""


def _make_environment(scratch: pathlib.Path, framework: str) -> dict[str, str]:
    """Returns the environment variables for a worker of the framework.

    Network addresses, credentials and the framework's own variables are removed. Home and caches are directories below
    ``scratch``.
    """
    home = scratch / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(read_matrix(framework).variables) and name.lower() not in _OF_NETWORK
    }
    homes = {"HOME": str(home), USERS_HOME: os.path.expanduser("~")}
    return kept | _OFFLINE | homes | {name: str(home / name.lower()) for name in _DIRECTORIES}


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ |= variables


def _store_variables(place: Place, store: dist.Store) -> Mapping[str, str]:
    """Returns the variables with which torchrun would announce a new store, which rank 0 serves on a free port."""
    if place.rank == 0:
        _served.append(dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False))
        store.set("port", str(_served[-1].port))
    return {"MASTER_PORT": store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
