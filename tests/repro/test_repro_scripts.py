"""The scripts that ``fsdp-doctor repro`` writes do what the case did, on the device that the matrix runs on."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch
from program import default_matrix, doctor, torchrun_script
from support.forked import ScriptRun, run_script

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import known_failures
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.frameworks.framework_scenarios import is_framework_id
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult
from fsdp_doctor.repro import Expectation, expected, reported, script

_OK = Expectation(kind="ok")
# Values of the optimizer's state, which a script has nothing to compare with.
_UNSEEN = "nonblocking-offload-optimizer-state-unsharded"
# What moves FSDP1's units and what compares names and values meet in one script.
_MOST_LINES = {(1, "parameters.module_source"): 133}
# Cases beyond the default matrix, of other axes and other ways to fail; a hang would cost its minute.
_BEYOND = tuple(
    entry.evidence
    for entry in known_failures()
    if entry.reproduced
    and not is_framework_id(entry.evidence)
    and entry.id != _UNSEEN
    and not entry.evidence_device
    and entry.verdict != "hang"
    # There is no script of a model that is sharded so.
    and "tp" not in entry.evidence.split("/")
    and entry.shows_on(torch.__version__)
)


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


@pytest.fixture(scope="module")
def bad() -> tuple[CaseResult, ...]:
    """The bad extractions of the default matrix."""
    return tuple(result for result in default_matrix().bad if _direction(result.case) == "out")


def _direction(case: Case) -> Direction:
    return find_path(case.path, case.scenario.version).direction


@pytest.fixture(scope="module")
def runs(bad: tuple[CaseResult, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScriptRun]:
    """The script of each of them, by the id of its case."""
    directory = tmp_path_factory.mktemp("scripts")
    return {result.id: _run(directory, script(result.case, reported(result.case, default_matrix()))) for result in bad}


def _run(directory: pathlib.Path, text: str) -> ScriptRun:
    file = directory / "script.py"
    # A rank that waits for one which raised need not wait as long as a user's.
    file.write_text(text.replace("threading.Timer(60,", "threading.Timer(20,"))
    return run_script(file)


def test_the_script_of_every_bad_extraction_of_the_default_matrix_ends_as_the_case_did(
    runs: dict[str, ScriptRun],
) -> None:
    assert len(runs) > 90
    assert {case_id: run for case_id, run in runs.items() if run.codes != [0, 0]} == {}


def test_it_fails_with_the_same_exception_or_the_same_wrong_tensors(
    bad: tuple[CaseResult, ...], runs: dict[str, ScriptRun]
) -> None:
    """Looked at from outside: what the scripts printed, against the report's own words."""
    for result in bad:
        output = " ".join(runs[result.id].output.split())
        failure = next((r.record.failure for r in result.ranks if r.record and r.record.failure), None)
        if result.verdict.kind in ("crash", "poisoned"):
            assert failure is not None
            message = " ".join(failure.message.split(": [(")[0].split())
            assert f"{result.verdict.kind}: {failure.type}: {message}" in output, result.id
        elif result.verdict.kind in ("wrong", "misplaced"):
            names, _, more = result.verdict.reason.partition(": ")[2].partition(" and ")
            count = len(names.split(", ")) + int(more.split()[0])
            assert f"{result.verdict.kind}: {count} entries: {names}" in output, result.id
        else:
            assert f"{result.verdict.kind}: " in output, result.id


@pytest.mark.parametrize("case_id", _BEYOND)
def test_the_script_of_an_entrys_evidence_ends_as_the_catalogue_says(tmp_path: pathlib.Path, case_id: str) -> None:
    run = _run(tmp_path, script(_case(case_id), expected(_case(case_id))))
    assert run.codes == [0, 0], run.output


@pytest.mark.parametrize(
    "case_id",
    [
        "fsdp2/none/unstaged/fp32-compute/unshard",
        "fsdp1/policy/unstaged/fp32-compute/full_state_dict",
        "fsdp1/none/unstaged/fresh/fp32-compute/rank_files",
    ],
)
def test_a_script_without_mixed_precision_ends_as_the_case_does(tmp_path: pathlib.Path, case_id: str) -> None:
    text = script(_case(case_id), _OK)
    assert "MixedPrecision" not in text
    run = _run(tmp_path, text)
    assert run.codes == [0, 0], run.output


def test_a_script_that_expects_something_else_says_so_and_ends_with_1(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/state_dict.to.full_tensor")
    wrong = Expectation(kind="crash", message="RuntimeError: nothing raises this")
    as_expected = _run(tmp_path, script(case, _OK))
    assert (as_expected.codes, as_expected.output.count("ok: PASS")) == ([0, 0], 2)
    assert _run(tmp_path, script(case, wrong)).codes == [1, 1]


def test_a_script_runs_under_torchrun_as_its_docstring_says(tmp_path: pathlib.Path) -> None:
    """On the CPU, without anything of ours in the process."""
    file = tmp_path / "r.py"
    made = doctor("repro", "fsdp2/none/unstaged/summon_full_params", "--out", str(file))
    assert (made.code, made.stdout) == (0, "")
    assert "torchrun --nproc-per-node 2 r.py" in file.read_text()
    done = torchrun_script(file, tmp_path)
    assert (done.code, "wrong: 25 entries: model.embed_tokens.weight" in done.stdout) == (0, True), done.stderr


def test_the_scripts_of_bad_extractions_are_under_120_lines_and_have_versions_and_command(
    bad: tuple[CaseResult, ...],
) -> None:
    for result in bad:
        text = script(result.case, reported(result.case, default_matrix()))
        most = _MOST_LINES.get((result.case.scenario.version, result.case.path), 120)
        assert len(text.splitlines()) < most, result.id
        head = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        assert f"torch {torch.__version__}" in head
        assert "torchrun --nproc-per-node" in head
        assert result.id in head


def test_an_exception_before_the_cycle_ends_a_script_that_expects_a_hang_with_1(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/uneven/from_local")
    text = script(case, expected(case))
    run = _run(tmp_path, text.replace("    loss.backward()", '    raise RuntimeError("planted")'))
    assert run.codes == [1, 1], run.output
    assert "planted" in run.output


def test_a_scripts_own_check_does_not_hide_the_race_that_it_is_to_show(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/param/unstaged/nonblocking/get_model_state_dict.sharded")
    run = _run(tmp_path, script(case, expected(case)))
    assert run.codes == [0, 0], run.output


def test_a_case_that_the_report_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="the report has no case"):
        reported(_case("fsdp1-orig/none/unstaged/state_dict"), default_matrix())
