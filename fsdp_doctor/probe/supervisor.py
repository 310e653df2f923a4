"""The supervisors: one on each rank, agreeing over torchrun's own store on what the workers do.

Rank 0's is the conductor. It gives out instructions (start a generation of workers, run a case,
retire the generation, end), every rank performs them on its own worker and posts a report, and
the conductor gathers the reports. A supervisor makes no CUDA context and runs no case, so that
nothing a case does can take it along.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, Interrupted, UsageError
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.cases import Case, scenario_of
from fsdp_doctor.probe.worker import Job
from fsdp_doctor.probe.worker_process import Process
from fsdp_doctor.verdict.records import RankReport, Record, rank_report_from_dict, rank_report_to_dict

# The first polls of a round are short, so that the supervisors add little to a case of some
# milliseconds; later ones are long, so that they leave the processor to the workers.
_SHORT_POLL, _LONG_POLL, _SHORT_PHASE = 0.002, 0.02, 0.3
_REPORT_SECONDS = 60.0
# What takes long because the model is large, and not because something is stuck.
_GROWING_STAGES = ("start", "build", "reference", "fingerprint", "verify")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long and how much a worker may take.

    start: seconds for starting a generation, for building a scenario and for the doctor's own work
    on it, which grow with the model. stage: seconds without progress elsewhere. grace: seconds that
    the other ranks have to end by themselves once one rank is in trouble. host_bytes: resident
    memory of one worker, None for no limit.
    """

    start: float = 300.0
    stage: float = 30.0
    grace: float = 5.0
    host_bytes: int | None = None


class Interruption:
    """Turns SIGINT, SIGTERM and SIGHUP into an exception at the next safe point."""

    def __init__(self) -> None:
        self._received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self._received is not None:
            raise Interrupted(f"stopped by {signal.Signals(self._received).name}")


def share_job(store: dist.Store, job: Job, limits: Limits) -> None:
    """Rank 0 says what the job is; see :func:`receive_job`."""
    shared = {
        "device": dataclasses.asdict(job.device),
        "cases": [[dataclasses.asdict(case.scenario), case.path] for case in job.cases],
        "user_paths": job.user_paths,
        "custom_model": str(job.custom_model) if job.custom_model else None,
        "scratch": str(job.scratch),
        "limits": dataclasses.asdict(limits),
    }
    store.set("job", json.dumps(shared))


def receive_job(store: dist.Store, place: Place, interruption: Interruption) -> tuple[Job, Limits]:
    """What rank 0 said, for the rank of ``place``. Where rank 0 refuses to begin, torchrun ends the wait."""
    while not store.check(["job"]):
        interruption.check()
        time.sleep(_LONG_POLL)
    shared = json.loads(store.get("job"))
    job = Job(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        num_nodes=place.num_nodes,
        device=RunDevice(**shared["device"]),
        cases=tuple(Case(scenario_of(scenario), path) for scenario, path in shared["cases"]),
        user_paths=tuple(shared["user_paths"]),
        custom_model=pathlib.Path(shared["custom_model"]) if shared["custom_model"] else None,
        scratch=pathlib.Path(shared["scratch"]),
    )
    return job, Limits(**shared["limits"])


class Member:
    """One rank's part: it performs instructions on its own worker and posts what came of them."""

    def __init__(self, job: Job, store: dist.Store, limits: Limits, interruption: Interruption) -> None:
        self.job = job
        self.limits = limits
        self.store = store
        self._interruption = interruption
        self._process: Process | None = None
        self._round = 0
        self._began = 0.0
        self._generation = 0
        self._posted = True
        self._told_trouble = False
        self._stop_seen: float | None = None

    def follow(self) -> None:
        """Performs the conductor's instructions until it says end. For every rank but 0."""
        number = 0
        while True:
            number += 1
            while not self._there(f"instruction/{number}"):
                self._poll()
            instruction = json.loads(self.store.get(f"instruction/{number}"))
            if instruction["do"] == "end":
                return
            self.perform(instruction)
            while not self.tick():
                pass

    def perform(self, instruction: dict[str, Any]) -> None:
        """Begins one instruction; :meth:`tick` then brings it to its end."""
        match instruction["do"]:
            case "start":
                self._generation += 1
                self._process = Process(self.job, self._generation, instruction["backend"])
                self._open_round()
            case "case":
                assert self._process is not None
                self._process.begin(instruction["case"])
                self._open_round()
            case "retire":
                self.close()
            case unknown:
                raise DoctorFault(f"there is no instruction {unknown!r}")

    def tick(self) -> bool:
        """One look at the worker and at the store. True once this rank's report is posted."""
        self._poll()
        if self._posted:
            return True
        process = self._process
        assert process is not None
        self._watch_memory(process)
        if process.report().in_trouble and not self._told_trouble:
            self._told_trouble = True
            self.store.set(self.key("trouble"), str(self.job.rank))
        if not process.settled and self._there(self.key("stop")) and not self._must_wait_for_the_others(process):
            reason = json.loads(self.store.get(self.key("stop")))
            process.stop(reason["why"], reason["detail"])
        if process.settled:
            self._post(process.report())
        return self._posted

    def _must_wait_for_the_others(self, process: Process) -> bool:
        """A suspended worker is woken for its stack, and would then let the others' collectives finish:
        they are stopped first."""
        if self._stop_seen is None:
            self._stop_seen = time.monotonic()
        if not process.suspended or time.monotonic() - self._stop_seen > _REPORT_SECONDS / 10:
            return False
        others = [self.key(f"report/{rank}") for rank in range(self.job.world_size) if rank != self.job.rank]
        return bool(others) and not self.store.check(others)

    def close(self) -> None:
        """Ends the worker, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def key(self, name: str) -> str:
        return f"round/{self._round}/{name}"

    def last_record(self) -> Record | None:
        """What this rank's worker said last of its case."""
        return self._process.report().record if self._process is not None else None

    def seconds(self) -> float:
        """How long the round has lasted."""
        return time.monotonic() - self._began

    def _open_round(self) -> None:
        self._round += 1
        self._began = time.monotonic()
        self._posted = self._told_trouble = False
        self._stop_seen = None

    def _post(self, report: RankReport) -> None:
        self.store.set(self.key(f"report/{self.job.rank}"), json.dumps(rank_report_to_dict(report)))
        self._posted = True

    def _poll(self) -> None:
        self._interruption.check()
        seconds = _SHORT_POLL if self.seconds() < _SHORT_PHASE else _LONG_POLL
        if self._process is not None:
            self._process.pump(seconds)
        else:
            time.sleep(seconds)

    def _watch_memory(self, process: Process) -> None:
        limit = self.limits.host_bytes
        if limit is None or process.settled:
            return
        resident = process.resident_bytes()
        if resident > limit:
            process.stop("memory", f"held {resident >> 20} MiB of host memory, the limit is {limit >> 20} MiB")

    def _there(self, key: str) -> bool:
        return bool(self.store.check([key]))


class Conductor:
    """Rank 0's supervisor: gives the instructions, performs its own part, gathers the reports."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._instructions = 0
        self.backend = ""

    def start(self, backend: str) -> list[RankReport]:
        """Starts a generation of workers on every rank.

        Raises what the workers say if they cannot run here, DoctorFault if they end in the start.
        """
        self.backend = backend
        self._instruct({"do": "start", "backend": backend})
        reports = self._gather()
        for report in reports:
            if report.refused is not None:
                raise _ERROR_OF.get(report.refused.exit_code, DoctorFault)(report.refused.reason)
        missing = sorted((report for report in reports if report.ready is None), key=lambda r: r.exit_time)
        if missing:
            raise DoctorFault(f"the worker of rank {missing[0].rank} did not start: {_how(missing[0])}")
        return reports

    def run(self, case_number: int) -> list[RankReport]:
        """Runs a case in the present generation; returns every rank's report."""
        self._instruct({"do": "case", "case": case_number})
        return self._gather()

    def retire(self) -> None:
        """Ends the present generation on every rank, if there is one."""
        if self.backend:
            self.backend = ""
            self._instruct({"do": "retire"})

    def end(self) -> None:
        """Lets the other supervisors go."""
        self._instruct({"do": "end"})

    def _instruct(self, instruction: dict[str, Any]) -> None:
        self._instructions += 1
        self._member.store.set(f"instruction/{self._instructions}", json.dumps(instruction))
        if instruction["do"] != "end":
            self._member.perform(instruction)

    def _gather(self) -> list[RankReport]:
        member = self._member
        keys = [member.key(f"report/{rank}") for rank in range(member.job.world_size)]
        watch = _Watch(member)
        while not (member.tick() and member.store.check(keys)):
            watch.look()
        return [rank_report_from_dict(json.loads(member.store.get(key))) for key in keys]


class _Watch:
    """Decides when a round stands still, and tells the ranks to stop their workers.

    Progress is any record of rank 0's worker: another stage, or another tensor now and then.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._seen = member.last_record()
        self._seen_at = 0.0
        self._trouble_at: float | None = None
        self._stopped_at: float | None = None

    def look(self) -> None:
        member, seconds = self._member, self._member.seconds()
        if self._stopped_at is not None:
            if seconds - self._stopped_at > _REPORT_SECONDS:
                raise DoctorFault("a supervisor did not report in time; its rank cannot be told")
            return
        if self._trouble_at is None and member.store.check([member.key("trouble")]):
            self._trouble_at = seconds
        if member.last_record() is not self._seen:
            self._seen, self._seen_at = member.last_record(), seconds
        stage = self._seen.stage if self._seen is not None else "start"
        limit = member.limits.start if stage in _GROWING_STAGES else member.limits.stage
        if self._trouble_at is not None and seconds - self._trouble_at > member.limits.grace:
            self._stop("others", "still at it when another rank was in trouble", seconds)
        elif seconds - self._seen_at > limit:
            self._stop("deadline", f"no progress in stage {stage} for {limit:g} s", seconds)

    def _stop(self, why: str, detail: str, seconds: float) -> None:
        self._stopped_at = seconds
        self._member.store.set(self._member.key("stop"), json.dumps({"why": why, "detail": detail}))


_ERROR_OF: dict[int, Callable[[str], FsdpDoctorError]] = {2: UsageError, 3: CannotRun}


def _how(report: RankReport) -> str:
    output = report.output.strip().splitlines()[-1:]
    ending = report.exit or report.stopped_detail or "it said nothing readable"
    return ending + (f" ({output[0]})" if output else "")


def prepare() -> None:
    """Imports what every worker needs, once, before the first fork. Makes no CUDA context."""
    # torch.cuda.is_available() would otherwise initialize CUDA in this process, and a fork of it
    # could not use CUDA any more.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import transformers

    import fsdp_doctor.case.runner  # noqa: F401, the workers' own rooms

    # Lazy attributes of transformers: looked up here once instead of in every worker.
    for name in ("AutoConfig", "AutoModelForCausalLM", "Qwen3Config", "Qwen3ForCausalLM"):
        getattr(transformers, name, None)
    # Workers collect garbage often; what was imported need not be looked at again each time.
    gc.collect()
    gc.freeze()
