"""Collects the facts about this machine that a bug report needs, from an allow-list.

The facts contain no user name, no host name unless it is requested, and no home directory, which is written as ``~``.
Only environment variables that change the behaviour of torch or NCCL are included.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from typing import TypedDict

from fsdp_doctor.machine.versions import read_installed_versions

PACKAGES = ("fsdp-doctor", "torch", "transformers", "peft", "accelerate", "numpy", "vllm", "sglang", "verl")
# The variable with the user's home directory in a framework's worker, whose HOME is another directory because a
# framework may write to it.
USERS_HOME = "FSDP_DOCTOR_USERS_HOME"
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BLOCKING_WAIT",
)

_LABELS = {
    "torch": "PyTorch version",
    "cuda": "CUDA used to build PyTorch",
    "hip": "ROCM used to build PyTorch",
    "host": "Host",
    "python": "Python version",
    "platform": "Python platform",
    "accelerators": "GPU models and configuration",
    "driver": "Nvidia driver version",
    "nccl": "NCCL version",
    "cpus": "CPU(s)",
    "variables": "Environment variables",
    "packages": "Versions of relevant libraries",
}


class EnvironmentFacts(TypedDict, total=False):
    """Facts about the machine, from an allow-list. Facts that are not available are missing.

    host: the name of the host, only if it was requested.
    torch: the version of torch, or the reason why torch cannot be imported.
    cuda, hip: the version that torch was built for.
    accelerators: the names of the accelerators.
    nccl, driver: the versions of NCCL and of Nvidia's driver.
    """

    python: str
    platform: str
    cpus: int | None
    packages: dict[str, str]
    variables: dict[str, str]
    host: str
    torch: str
    cuda: str
    hip: str
    accelerators: list[str]
    nccl: str
    driver: str


def collect_without_torch(host_name: bool = False) -> EnvironmentFacts:
    """Collects the facts for which torch is not needed.

    host_name: whether to include the name of the host.
    """
    facts: EnvironmentFacts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": read_installed_versions(PACKAGES),
        "variables": {
            name: write_home_as_tilde(value) for name in VARIABLES if (value := os.environ.get(name)) is not None
        },
    }
    if host_name:
        facts["host"] = socket.gethostname()
    return facts


def collect_of_torch() -> EnvironmentFacts:
    """Collects the facts about torch and the accelerators. Imports torch, but makes no context on a device."""
    import torch

    facts: EnvironmentFacts = {"torch": str(torch.__version__), "cuda": torch.version.cuda or ""}
    if torch.version.hip:
        facts["hip"] = torch.version.hip
    if torch.cuda.is_available():
        facts["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        facts["driver"] = _find_nvidia_driver()
    else:
        facts["accelerators"] = []
    return facts


def collect(host_name: bool = False) -> EnvironmentFacts:
    """Collects all facts. torch is imported in a separate process, because a failing import is a fact, too.

    host_name: whether to include the name of the host.
    """
    program = (
        "import json; from fsdp_doctor.machine.environment import collect_of_torch; "
        "print(json.dumps(collect_of_torch()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment
        )
        facts: EnvironmentFacts | None = json.loads(answer.stdout.splitlines()[-1]) if answer.returncode == 0 else None
        trouble = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        facts, trouble = None, str(error)
    if facts is None:
        facts = {"torch": f"cannot be imported: {write_home_as_tilde(trouble)}"}
    return collect_without_torch(host_name) | facts


def format_lines(facts: EnvironmentFacts) -> list[str]:
    """Formats the facts in the form and order of ``torch.utils.collect_env``, which PyTorch asks for in issues."""
    lines = []
    for name, label in _LABELS.items():
        match facts.get(name):
            case None:
                continue
            case dict(values):
                prefix = "[pip3] " if name == "packages" else ""
                separator = "==" if name == "packages" else "="
                lines += [f"{label}:", *(f"{prefix}{key}{separator}{value}" for key, value in values.items())]
            case list(values):
                lines.append(f"{label}: {', '.join(values) or 'No devices found.'}")
            case value:
                lines.append(f"{label}: {value or 'None'}")
    return lines


def write_home_as_tilde(text: str) -> str:
    """Replaces the home directory in ``text`` by ``~``, as in every text of a report."""
    home = os.environ.get(USERS_HOME) or os.path.expanduser("~")
    if len(home) < 2:
        return text
    return re.sub(rf"(?<![\w/.-]){re.escape(home)}(?![\w.-])", "~", text)


def _find_nvidia_driver() -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 and answer.stdout.strip() else ""
