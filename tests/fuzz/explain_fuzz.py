"""Fuzzes ``fsdp-doctor explain`` with a coverage-guided fuzzer: no traceback, at most 2 seconds for each MB.

    python3.11 -m venv ../fuzz
    ../fuzz/bin/pip install atheris==3.0.0 packaging typer pyyaml typing-extensions
    PYTHONPATH=. ../fuzz/bin/python tests/fuzz/explain_fuzz.py ../inputs -max_total_time=1800 -rss_limit_mb=500

The folder is filled from the logs of ``tests/corpus`` where it is empty. A find is written as ``crash-*`` or ``slow-*``
and becomes a test of ``tests/explain/test_explain_bounds.py``. The limit of memory is that of this process, 300 MB of
ours and what the fuzzer takes.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import tempfile
import time

import atheris

with atheris.instrument_imports(include=["fsdp_doctor"]):
    from fsdp_doctor.errors import UsageError
    from fsdp_doctor.explain import explain
    from fsdp_doctor.explain.text import render_json, render_text

_SEEDS = pathlib.Path(__file__).resolve().parents[1] / "corpus" / "logs"
_SECONDS_FOR_EACH_MB = 2.0
# What starting to read any file may take.
_SECONDS_AT_LEAST = 1.0
_FILE = pathlib.Path(tempfile.mkdtemp()) / "nccl_trace_rank_0"
_REPEATED = 64


def _explained(data: bytes) -> None:
    _FILE.write_bytes(data)
    begin = time.process_time()
    try:
        found = explain([_FILE])
    except UsageError:
        return
    render_text(found, 100)
    render_json(found)
    seconds = time.process_time() - begin
    if seconds > _SECONDS_AT_LEAST + _SECONDS_FOR_EACH_MB * len(data) / 1e6:
        pathlib.Path(f"slow-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
        raise TimeoutError(f"{seconds:.1f} s for {len(data)} bytes")


def one_input(data: bytes) -> None:
    """The first byte says whether the rest is repeated: what costs more than its size shows only then."""
    if not data:
        return
    _explained(data[1:] * (_REPEATED if data[0] % 8 == 0 else 1))


def _fill(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for seed in _SEEDS.glob("*"):
            if seed.is_file():
                (folder / seed.name).write_bytes(b"\1" + seed.read_bytes())


if __name__ == "__main__":
    _fill(pathlib.Path(next(word for word in sys.argv[1:] if not word.startswith("-"))))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
