"""Checksums of a running engine's weights show which tensors a weight sync left unchanged, and which differ between
replicas.

The answers of the engines were read in vLLM 0.33.0 (``entrypoints/rl/online/api_router.py``,
``v1/worker/gpu_worker.py``) and SGLang 0.5.23 (``entrypoints/http_server.py``, ``utils/weight_checker.py``).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_ENDPOINTS = {"vllm": "weight_checker", "sglang": "weights_checker"}


@dataclass(frozen=True)
class EngineChecksums:
    """Digests of an engine's tensors, by (replica, rank within the replica, the engine's name of the tensor).

    A digest covers the tensor in the engine's own layout (fused for a kernel, or quantized), so it can be compared only
    with digests of the same engine, not with the trainer's tensors.
    """

    digests: Mapping[tuple[str, str, str], str]

    def list_unchanged(self, earlier: EngineChecksums) -> list[str]:
        """Lists the tensors whose digest is the same as in ``earlier`` on at least one rank.

        earlier: the checksums at an earlier time, for example before a sync.
        """
        return sorted({place[2] for place, digest in self.digests.items() if earlier.digests.get(place) == digest})

    def list_differing(self) -> list[str]:
        """Lists the tensors that are missing on a replica or differ between replicas."""
        replicas = {replica for replica, _, _ in self.digests}
        return sorted(
            {
                name
                for rank, name in {place[1:] for place in self.digests}
                if len({self.digests.get((replica, rank, name)) for replica in replicas}) > 1
            }
        )


def read_engine_checksums(url: str, engine: Literal["vllm", "sglang"], *, timeout: float = 600.0) -> EngineChecksums:
    """Asks the engine's server for the checksums of its weights, and waits while the server computes them.

    vLLM answers only if it was started with VLLM_SERVER_DEV_MODE=1. Any process may call this function. Raises OSError
    if the server does not answer or refuses, and ValueError if the answer has an unknown form.

    url: the address of the server.
    timeout: the time limit, in seconds.
    """
    request = urllib.request.Request(
        f"{url.rstrip('/')}/{_ENDPOINTS[engine]}",
        data=json.dumps({"action": "checksum"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer = json.load(response)
    try:
        return EngineChecksums(dict(_read_vllm(answer) if engine == "vllm" else _read_sglang(answer)))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{engine} at {url} answered in a form that is not known: {error!r}") from error


def _read_vllm(answer: Any) -> Iterator[tuple[tuple[str, str, str], str]]:
    for key, digest in answer["checksums"].items():
        replica, *ranks, name = key.split(":", 4)
        yield (replica, ":".join(ranks), name), digest


def _read_sglang(answer: Any) -> Iterator[tuple[tuple[str, str, str], str]]:
    for rank in answer["ranks"]:
        info = rank["parallelism_info"][0]
        for name, digest in rank["checksums"].items():
            yield (f"dp{info['dp_rank']}", f"pp{info['pp_rank']}:tp{info['tp_rank']}", name), digest
