"""``--expect`` and ``--strict``: which verdicts are unexpected, what is said of them, and the exit code."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib

import pytest
from program import Run, probe
from support.inside import doctor

from fsdp_doctor.errors import CannotRun, DoctorFault
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.methods import METHOD_NAMES
from fsdp_doctor.probe.baseline import Baseline, Judgement
from fsdp_doctor.report.document import CaseResult, Report, make_case_fields
from fsdp_doctor.verdict.classification import Verdict, VerdictKind

_GPUS = RunContext(torch="2.13.0+cu130", device="cuda", world_size=2)
_HALF_MOVED = "fsdp2/policy/staged/state_dict"
_FINE = "fsdp2/none/staged/state_dict"
_RACE = "fsdp2/param/unstaged/nonblocking/state_dict"
_TORCH = tuple(int(part) for part in importlib.metadata.version("torch").split("+")[0].split(".")[:2])


def _result(case_id: str, kind: VerdictKind, known: str = "") -> CaseResult:
    verdict = Verdict(kind=kind, reason="" if kind == "ok" else "it broke")
    return CaseResult(**make_case_fields(parse_case_id(case_id, METHOD_NAMES)), verdict=verdict, known=known)


def _report(*results: CaseResult, context: RunContext = _GPUS) -> Report:
    return Report(
        version="0",
        created="",
        command="",
        device=context.device,
        world_size=2,
        num_selected=len(results),
        environment={"packages": {"torch": context.torch}},
        results=results,
    )


def _judge(*results: CaseResult, context: RunContext = _GPUS) -> tuple[list[str], str, int]:
    """The sentences on what is unexpected, the last line, and the exit code."""
    judgement = Judgement(_report(*results, context=context), "known")
    return judgement.unexpected, judgement.conclusion, judgement.choose_exit_code()


_AS_KNOWN = _result(_HALF_MOVED, "crash", "fsdp2-pinned-policy-half-moved")


def test_an_expected_failure_is_not_reported() -> None:
    said, last, code = _judge(_AS_KNOWN, _result(_FINE, "ok"))
    assert (said, code) == ([], 0)
    assert last == "2 cases: 1 ok, 1 as torch 2.13 is known to fail, 0 unexpected"


def test_unexpected_failures_come_before_expected_failures_that_are_missing() -> None:
    said, last, code = _judge(_result(_HALF_MOVED, "ok"), _result(_FINE, "hang"))
    assert said == [
        f"unexpected: {_FINE} is hang, not ok: it broke",
        f"expected and not seen: {_HALF_MOVED} is ok, not crash (fsdp2-pinned-policy-half-moved)",
    ]
    assert code == 1
    assert last == "2 cases: 0 ok, 0 as torch 2.13 is known to fail, 2 unexpected"


@pytest.mark.parametrize(
    ("kind", "known"),
    [("crash", ""), ("crash", "fsdp2-params-not-on-cpu-at-lazy-init"), ("hang", "fsdp2-pinned-policy-half-moved")],
)
def test_an_expected_failure_needs_both_the_same_verdict_and_the_same_reason(kind: VerdictKind, known: str) -> None:
    said, _, code = _judge(_result(_HALF_MOVED, kind, known))
    recognized = f" ({known})" if known else ""
    assert said == [
        f"unexpected: {_HALF_MOVED} is {kind}{recognized}, not crash (fsdp2-pinned-policy-half-moved): it broke"
    ]
    assert code == 1


def test_a_failure_that_another_torch_does_not_show_is_unexpected_on_it() -> None:
    assert _judge(_AS_KNOWN, context=RunContext(torch="2.8.0"))[2] == 1
    assert _judge(_result(_HALF_MOVED, "ok"), context=RunContext(torch="2.8.0"))[2] == 0


@pytest.mark.parametrize("won", [True, False])
def test_a_race_may_be_won_or_lost_on_an_accelerator(won: bool) -> None:
    result = _result(_RACE, "ok") if won else _result(_RACE, "wrong", "non-blocking-d2h-read-too-early")
    assert _judge(result)[2] == 0
    # The emulated device's copies are late for certain.
    assert _judge(result, context=RunContext(torch="2.13.0", device="emulated"))[2] == won


def test_a_race_that_only_the_emulated_device_sees_may_lose_values_elsewhere() -> None:
    case_id, entry = "fsdp1/none/unstaged/dcp.async_save.pinned", "async-save-stages-before-the-step-has-ended"
    for kind in ("ok", "race", "wrong"):
        assert _judge(_result(case_id, kind, "" if kind == "ok" else entry))[2] == 0
    assert _judge(_result(case_id, "wrong"))[2] == 1


def test_a_case_that_did_not_run_is_not_unexpected() -> None:
    said, last, code = _judge(_result(_HALF_MOVED, "unsupported"), _result(_FINE, "skipped"), _AS_KNOWN)
    assert (said, code) == ([], 0)
    assert last == "3 cases: 0 ok, 1 as torch 2.13 is known to fail, 2 not run, 0 unexpected"


@pytest.mark.parametrize("expected", ["nothing bad", "known"])
def test_a_run_of_which_nothing_could_run_cannot_be_judge(expected: Baseline) -> None:
    with pytest.raises(CannotRun):
        Judgement(_report(_result(_FINE, "unsupported")), expected).choose_exit_code()


@pytest.mark.parametrize("expected", ["nothing bad", "known", _report()])
def test_a_lost_result_is_the_doctors_fault_whatever_is_expected(expected: Baseline) -> None:
    with pytest.raises(DoctorFault, match="1 case without a result"):
        Judgement(_report(_result(_FINE, "lost")), expected).choose_exit_code()


def test_a_better_verdict_than_in_the_report_is_unexpected() -> None:
    expected = _report(_result(_FINE, "crash"), _AS_KNOWN)
    run = _report(_result(_FINE, "ok"), _AS_KNOWN, _result(_RACE, "wrong"))
    judgement = Judgement(run, expected)
    assert judgement.unexpected == [f"expected ok, got wrong: {_RACE}", f"expected crash, got ok: {_FINE}"]
    assert judgement.choose_exit_code() == 1
    same = Judgement(expected, expected)
    assert (same.unexpected, same.choose_exit_code()) == ([], 0)


# The program.

_SELECTED = ("--strategy", "fsdp2", "--offload", "none,policy", "--staging", "staged")


def _last(run: Run) -> str:
    return run.stderr.rstrip().splitlines()[-1]


def test_a_run_with_only_known_failures_passes_and_summarizes_them_last(tmp_path: pathlib.Path) -> None:
    words = (*_SELECTED, "--method", "summon_full_params,unshard", "--format", "table")
    done = probe(tmp_path, *words)
    assert done.code == 0, done.stderr
    torch = ".".join(map(str, _TORCH))
    assert _last(done) == f"4 cases: 2 ok, 2 as torch {torch} is known to fail, 0 unexpected"
    assert done.stdout.splitlines()[0] == f"PASS: {_last(done)}"
    assert done.report is not None
    strict = Judgement(done.report, "nothing bad")
    assert (strict.choose_exit_code(), strict.conclusion) == (1, "4 cases: 2 ok, 2 bad")


def test_a_failure_of_the_users_method_is_unexpected_and_comes_first(tmp_path: pathlib.Path) -> None:
    words = ("--method", "summon_full_params,faults.values:drops_a_key", "--format", "table")
    done = probe(tmp_path, *_SELECTED, *words)
    assert done.code == 1
    assert done.stdout.splitlines()[0] == f"FAIL: {_last(done)}"
    first, second = done.stderr.splitlines()[:2]
    for line, offload in ((first, "none"), (second, "policy")):
        assert line.startswith(f"unexpected: fsdp2/{offload}/staged/faults.values:drops_a_key is incomplete, not ok: ")
    assert _last(done).endswith("known to fail, 2 unexpected")


def test_a_report_whose_file_is_called_known_is_given_with_a_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "known").write_text(json.dumps({"schema": "another"}))
    done = doctor("probe", *_SELECTED, "--expect", "./known", cwd=tmp_path)
    assert done.code == 2
    assert "known is not a report of fsdp-doctor" in done.stderr


def test_the_failures_of_one_rank_of_fsdp1_are_expected_with_every_offload(tmp_path: pathlib.Path) -> None:
    """A single GPU is the first thing that many try; there FSDP1 falls back to NO_SHARD."""
    scenarios = ("--strategy", "fsdp1", "--offload", "none,param,optimizer,policy", "--staging", "unstaged")
    words = ("--nproc", "1", "--direction", "out", *scenarios)
    done = probe(tmp_path, *words, "--fix", device="emulated")
    assert done.code == 0, done.stderr
    assert done.report is not None
    shown = {result.known for result in done.report.bad}
    assert shown == {
        "async-save-stages-before-the-step-has-ended",
        "fsdp1-manual-offload-then-state-dict",
        "fsdp1-size1-ignores-offload-to-cpu",
        "fsdp1-size1-optimizer-state-on-cpu",
        "fsdp1-size1-policy-keeps-the-model",
        "module-source-of-fsdp1",
    }
    assert all(result.verdict.kind == "ok" for result in done.report.results if result.case.method == "full_tensors")


def test_the_failures_of_one_rank_after_a_raised_step_are_expected(tmp_path: pathlib.Path) -> None:
    """Its flat parameter then has the dtype of the computation and the shape of the shard."""
    scenarios = ("--strategy", "fsdp1", "--offload", "none", "--staging", "unstaged")
    phases = ("--phase", "after-raised-forward,after-raised-backward")
    done = probe(tmp_path, "--nproc", "1", *scenarios, *phases, "--fix", device="emulated")
    assert done.code == 0, done.stderr
    assert done.kind("after-raised-backward/full_tensors") == "ok"


def test_a_shard_that_one_rank_offloads_in_a_raised_step_is_lost(tmp_path: pathlib.Path) -> None:
    """The offload takes the copy in bfloat16, with which the unit computes, for the shard."""
    scenarios = ("--strategy", "fsdp1,fsdp1-orig", "--offload", "param", "--staging", "unstaged")
    methods = ("--phase", "after-raised-forward", "--fix", "--method", "state_dict,full_tensors,save_full_tensors")
    done = probe(tmp_path, "--nproc", "1", *scenarios, *methods, device="emulated")
    assert done.report is not None
    ours = [result.verdict.reason for result in done.report.results if "full_tensors" in result.case.method]
    assert [("the shard is lost" in reason) for reason in ours] == [True] * 4, ours


def test_three_ranks_whose_shards_are_uneven_are_expected_to_hang(tmp_path: pathlib.Path) -> None:
    words = ("--nproc", "3", "--timeout", "6", "--case", "fsdp2/none/unstaged/from_local")
    done = probe(tmp_path, *words, "--case", "fsdp2/none/unstaged/dcp", device="emulated")
    assert done.code == 0, done.stderr
    assert (done.kind("from_local"), done.kind("dcp")) == ("hang", "ok")
