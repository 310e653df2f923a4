"""Made-up reports, for tests that write them in every format."""

import dataclasses

from fsdp_doctor.machine.environment import collect_without_torch
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.cases import Case, make_scenario
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report, make_case_fields
from fsdp_doctor.report.schema import make_report_schema
from fsdp_doctor.verdict.classification import MEANING, Verdict
from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Ready, Record, Refused

SCHEMA = make_report_schema()
GITHUB_LIMIT = 65_536
CASES = select(Selection(directions=("out",)))
CONTROL = "\x00 \x1b[31mred\x1b[0m \x08 \ufffe \uffff"
TRACEBACK = "Traceback (most recent call last):\n" + '  File "torch/x.py", line 1, in f\n    g(h)\n' * 100
STACK = "Current thread 0x1 (most recent call first):\n" + '  File "torch/nn/modules/module.py", line 1 in call\n' * 40


def result(case=CASES[0], kind="crash", reason="it broke", *, ranks=(), traceback="", **fields):
    if traceback:
        failure = Failure(type="RuntimeError", message=reason, traceback=traceback, time=1.5)
        ranks = (RankReport(rank=0, record=Record(case_id=case.id, stage="extract", failure=failure, done=True)),)
    verdict = Verdict(kind=kind, reason=reason, ranks=(0,) if ranks else (), also=fields.pop("also", ()))
    return CaseResult(**make_case_fields(case), verdict=verdict, ranks=tuple(ranks), **fields)


def report(*results, **fields):
    return Report(
        **{
            "version": "0.1.0",
            "created": "2026-01-01T00:00:00+00:00",
            "command": "fsdp-doctor probe -k 'a & b < c'",
            "device": "cuda",
            "world_size": 2,
            "num_selected": len(results),
            "environment": {"python": "3.12", "torch": "2.9.0", "accelerators": ["An accelerator"]},
            "complete": True,
            "results": results,
            **fields,
        }
    )


def every_kind(**fields):
    """Makes a case for each verdict."""
    return [result(case, kind, f"reason of {kind}", **fields) for case, kind in zip(CASES, MEANING, strict=False)]


def everything():
    """Makes a report in which every field differs from its default."""
    case = Case(make_scenario({axis.name: list(axis.values)[-1] for axis in AXES}), "mod:fn")
    record = Record(
        case_id=case.id,
        stage="next step",
        failure=Failure(type="RuntimeError", message="it\nbroke", traceback="Traceback\n", time=1.5),
        unsupported="no",
        problems=(Problem(kind="leak", detail="1 byte"),),
        seconds=0.5,
        peak_extra_bytes=7,
        num_tensors=3,
        healthy=False,
        done=True,
    )
    facts = collect_without_torch(host_name=True) | {
        "torch": "2.9.0",
        "cuda": "12.8",
        "hip": "6",
        "accelerators": ["An accelerator"],
        "nccl": "2.27",
        "driver": "570",
    }
    rank = RankReport(
        rank=1,
        record=record,
        exit="SIGKILL",
        exit_time=2.5,
        oom_killed=True,
        stopped="deadline",
        stopped_detail="not done",
        process_state="was stopped by a signal",
        stack=STACK,
        garbled="{",
        output="text",
        refused=Refused(reason="no device", exit_code=3),
        ready=Ready(environment=facts),
    )
    verdict = Verdict(kind="leak", reason="1 byte", ranks=(1,), also=("poisoned: w",))
    complete = CaseResult(
        **make_case_fields(case),
        verdict=verdict,
        seconds=0.5,
        peak_extra_bytes=7,
        wall_seconds=1.25,
        confirmation=dataclasses.replace(verdict, kind="ok"),
        ranks=(rank, RankReport(rank=0)),
    )
    return report(
        complete,
        *every_kind(),
        environment=facts,
        rerun_options="--nproc 2",
        notes=("a note",),
        complete=False,
        ended="SIGINT",
        seconds=9.5,
    )


def squeezed(text):
    return "".join(text.split())
