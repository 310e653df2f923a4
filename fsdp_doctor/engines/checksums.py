"""The checksums of a running engine's weights: what a sync left as it was, and where replicas differ.

Read in vLLM 0.33.0 (``entrypoints/rl/online/api_router.py``, ``v1/worker/gpu_worker.py``) and SGLang 0.5.23
(``entrypoints/http_server.py``, ``utils/weight_checker.py``).
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from typing_extensions import assert_never

_Place: TypeAlias = tuple[int, str, str]
"""(replica, rank in it, the engine's name of the tensor)."""

_VLLM_KEY = re.compile(r"dp(\d+):(pp\d+:pcp\d+:tp\d+):(.+)")


@dataclass(frozen=True)
class EngineChecksums:
    """A digest of each tensor that a rank of the engine has, in the engine's layout.

    It is comparable with those of the same engine alone: a layout that a kernel needs, or a quantization, has no
    counterpart in the trainer.
    """

    digests: Mapping[_Place, str]

    def list_unchanged(self, earlier: EngineChecksums) -> list[str]:
        """The tensors that some rank has as it had them ``earlier``, such as before the sync."""
        return sorted({place[2] for place, digest in self.digests.items() if earlier.digests.get(place) == digest})

    def list_differing(self) -> list[str]:
        """The tensors that not all replicas have, or have alike."""
        replicas = {replica for replica, _, _ in self.digests}
        alike = {
            place: {self.digests.get((replica, *place)) for replica in replicas}
            for place in {(rank, name) for _, rank, name in self.digests}
        }
        return sorted({name for (_, name), digests in alike.items() if len(digests) > 1})


def read_engine_checksums(url: str, engine: Literal["vllm", "sglang"], *, timeout: float = 600.0) -> EngineChecksums:
    """Asks the engine's server at ``url`` for the checksums of its weights, which it computes meanwhile.

    vLLM has them with VLLM_SERVER_DEV_MODE=1. timeout: seconds. Any process may call it.
    Raises OSError where the server does not answer or refuses, ValueError for an answer of another form.
    """
    endpoint = {"vllm": "weight_checker", "sglang": "weights_checker"}[engine]
    request = urllib.request.Request(
        f"{url.rstrip('/')}/{endpoint}",
        data=json.dumps({"action": "checksum"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer = json.load(response)
    try:
        match engine:
            case "vllm":
                return EngineChecksums({_read_vllm_key(key): digest for key, digest in answer["checksums"].items()})
            case "sglang":
                return EngineChecksums(dict(pair for rank in answer["ranks"] for pair in _read_sglang_rank(rank)))
            case _:
                assert_never(engine)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{engine} at {url} answered in a form that is not known: {error!r}") from error


def _read_vllm_key(key: str) -> _Place:
    match = _VLLM_KEY.fullmatch(key)
    if match is None:
        raise KeyError(key)
    return int(match[1]), match[2], match[3]


def _read_sglang_rank(rank: Mapping[str, Any]) -> list[tuple[_Place, str]]:
    info = rank["parallelism_info"][0]
    place = f"pp{info['pp_rank']}:tp{info['tp_rank']}"
    return [((int(info["dp_rank"]), place, name), digest) for name, digest in rank["checksums"].items()]
