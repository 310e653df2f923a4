"""``fsdp-doctor explain`` as a process: what it reads from a pipe, the memory that it takes, a log of torchrun."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from program import Run, Started, torchrun

from fsdp_doctor.explain import explain

_STORAGE = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"cuda:{}".  This is no longer allowed; the devices must match.'
)


_UNSHARD = "AssertionError: Expects tensor to be on the compute device cuda:{}, was on cpu"


_BEGIN = "Traceback (most recent call last):"


def _traceback(raised: str) -> list[str]:
    return [
        _BEGIN,
        '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in rollout_mode',
        "    params = self.actor_module_fsdp.state_dict()",
        '  File "/opt/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 2256, in state_dict',
        "    hook(self, prefix, keep_vars)",
        raised,
    ]


def test_json_has_the_same_and_reads_stdin(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "fsdp_doctor", "explain", "-", "--json"]
    text = "\n".join(_traceback(_STORAGE.format(0)))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    data: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, data["matched"], data["entry"]["id"]) == (0, True, "fsdp2-pinned-policy-half-moved")
    assert data["entry"]["command"] == "fsdp-doctor probe --case 'fsdp2/policy/staged/state_dict'"
    assert data["cause"]["line"] == 6


def test_memory_does_not_grow_with_the_log(tmp_path: pathlib.Path) -> None:
    line = "[rank{}]: 2026-11-20 10:00:00,000 INFO trainer step={} loss=0.1 lr=1e-5 " + "x" * 100 + "\n"
    file = tmp_path / "log.txt"

    def peak(megabytes: int) -> int:
        block = "".join(line.format(rank, rank) for rank in range(1000)) + "[rank1]: ValueError: not this one\n"
        with open(file, "w") as out:
            for _ in range(megabytes * 1_000_000 // len(block)):
                out.write(block)
            out.write("\n".join(_traceback(_UNSHARD.format(0))) + "\n")
        program = (
            "import resource, pathlib, sys; from fsdp_doctor.explain import explain; "
            "found = explain([pathlib.Path(sys.argv[1])]); assert found.entry is not None; "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert peak(60) < 1.2 * peak(6)


def test_the_log_of_a_real_torchrun_is_explained(tmp_path: pathlib.Path) -> None:
    """Two ranks really fail, torchrun really writes the log."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    from torch.distributed.utils import _p_assert\n"
        "    _p_assert(False, 'Expects tensor to be on the compute device cuda:1, was on cpu')\n"
        "time.sleep(60)\n"
    )
    run: Run = torchrun("--nproc-per-node=2", str(script))
    log = tmp_path / "log.txt"
    log.write_text(run.stdout + run.stderr)
    found = explain([log])
    assert found.entry is not None
    assert found.entry.id == "fsdp1-manual-offload-then-state-dict"
    assert found.summary is not None
    assert found.summary.rank == 1
    assert re.search("torchrun's summary", " ".join(found.consequences))


def test_a_named_pipe_is_waited_for_and_the_wait_can_be_stopped(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waiting = Started(sys.executable, "-m", "fsdp_doctor", "explain", str(pipe))
    with open(pipe, "w"):  # as soon as it is opened at the other end
        waiting.interrupt()
        run = waiting.wait()
    assert (run.code, run.stdout) == (130, "")
    assert run.stderr.startswith(f"fsdp-doctor: waiting for a program that writes to {pipe}, a named pipe\n")
    assert "Traceback" not in run.stderr
