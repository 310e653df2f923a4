"""Runs standalone scripts one after the other, each on two ranks, without importing torch anew for each.

``python run_scripts.py DIRECTORY [emulated]``: every ``*.py`` in it, on the accelerator that torch sees or on the
emulated one; prints a JSON line for each with the exit codes and what the
ranks printed. A rank is a process of its own, forked from one that has imported what scripts import; the store is
torchrun's agent's, played by this process. A script cannot tell the difference.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys
import tempfile
import threading
import traceback

import peft  # noqa: F401
import torch.distributed as dist
import transformers  # noqa: F401
from torch.distributed import fsdp  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

if sys.argv[2:] == ["emulated"]:
    import fsdp_doctor.emulated  # noqa: F401

_RANKS = 2


def main() -> None:
    for script in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
        # A store of its own for each script, as each torchrun has; it listens on the loopback interface alone.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryFile("w+") as output:
            ranks = [_start(script, rank, store.port, output.fileno()) for rank in range(_RANKS)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
            output.seek(0)
            print(json.dumps({"script": script.name, "codes": codes, "output": output.read()}), flush=True)
        del store


def _start(script: pathlib.Path, rank: int, port: int, output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
    # As the interpreter does at its end: a thread that is no daemon is waited for.
    threading._shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
