"""The client of the checksum endpoints, against a server that answers as vLLM 0.33.0 and SGLang 0.5.23 do."""

from __future__ import annotations

import json
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Literal

import pytest

from fsdp_doctor.weights.engines import read_engine_checksums

Engine = Literal["vllm", "sglang"]
_ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
_Replicas = list[dict[str, str]]


def _answer(path: str, replicas: _Replicas) -> dict[str, Any] | None:
    if path == "/weight_checker":
        keys = {f"dp{dp}:pp0:pcp0:tp0:{name}": v for dp, one in enumerate(replicas) for name, v in one.items()}
        return {"checksums": keys}
    if path == "/weights_checker":
        infos = [{"role": "target", "tp_rank": 0, "dp_rank": dp, "pp_rank": 0} for dp in range(len(replicas))]
        ranks = [{"checksums": one, "parallelism_info": [info]} for one, info in zip(replicas, infos, strict=True)]
        return {"success": True, "message": "Success.", "ranks": ranks}
    return None


@pytest.fixture
def server() -> Iterator[tuple[str, _Replicas]]:
    replicas: _Replicas = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = _answer(self.path, replicas) if asked == {"action": "checksum"} and replicas else None
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/", replicas
        http.shutdown()


@pytest.mark.parametrize("engine", _ENGINES)
def test_tensors_unchanged_by_a_sync_and_tensors_differing_between_replicas_are_named(
    server: tuple[str, _Replicas], engine: Engine
) -> None:
    url, replicas = server
    replicas[:] = [{"a.weight": "1", "b.weight": "2", "c:d": "3"}] * 2
    before = read_engine_checksums(url, engine)
    assert before.list_differing() == []
    replicas[:] = [{"a.weight": "5", "b.weight": "2", "c:d": "6"}, {"a.weight": "5", "b.weight": "7", "c:d": "6"}]
    after = read_engine_checksums(url, engine)
    assert after.list_unchanged(before) == after.list_differing() == ["b.weight"]
    replicas[1].pop("c:d")
    assert read_engine_checksums(url, engine).list_differing() == ["b.weight", "c:d"]


@pytest.mark.parametrize("engine", _ENGINES)
def test_a_server_that_refuses_or_answers_otherwise_is_an_error(server: tuple[str, _Replicas], engine: Engine) -> None:
    url, replicas = server
    with pytest.raises(urllib.error.HTTPError):
        read_engine_checksums(url, engine)
    replicas.append({"a": "1"})
    with pytest.raises(OSError, match="refused"):
        read_engine_checksums("http://127.0.0.1:9", engine)
