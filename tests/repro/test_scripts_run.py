"""The scripts that ``fsdp-doctor repro`` writes end as the case did, on the device that the matrix runs on.

A covering selection runs: each line that a script can have, each method of a bad case, each verdict of either FSDP.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable, Mapping

import pytest
import torch
from program import doctor, torchrun_script
from support.forked import ScriptRun, run_script
from support.places import ROOT

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import is_framework_id
from fsdp_doctor.matrix.methods import find_method
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.repro import Expectation, find_expected, read_reported, render_script

_OK = Expectation(kind="ok")
_METHODS = ROOT / "fsdp_doctor" / "case" / "methods"


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


@functools.cache
def _committed() -> Report:
    """The default matrix on the emulated device, whose verdicts a test of the matrix compares with today's."""
    return read_report(ROOT / "examples" / "reports" / "emulated.json.gz")


@functools.cache
def _reported_features() -> dict[str, frozenset[str]]:
    """Maps each case to the facts and the lines in which the scripts of the default matrix differ."""
    features = {}
    for result in _committed().results:
        method = find_method(result.method, result.case.scenario.version)
        if not method.is_fix and (result.verdict.bad or method.direction == "in"):
            text = render_script(result.case, read_reported(result.case, _committed()))
            facts = {f"{result.verdict.kind} of {result.case.scenario.version}", result.case.scenario.strategy}
            features[result.id] = _lines(text) | facts
    return features


def _evidence_features() -> dict[str, frozenset[str]]:
    """Maps the evidence of the catalogue's entries so: it has other axes and other ways to fail."""
    features = {}
    for entry in read_catalogue():
        shown_here = entry.reproduced and not entry.evidence_device and entry.shows_on(torch.__version__)
        # A hang would cost its minute. The emulated device runs kernels at once, so that what a stager reads is right.
        takes_part = entry.verdict != "hang" and entry.id != "async-save-stages-before-the-step-has-ended"
        if shown_here and not is_framework_id(entry.evidence) and takes_part:
            try:
                features[entry.evidence] = _lines(
                    render_script(_case(entry.evidence), find_expected(_case(entry.evidence)))
                )
            except UsageError:
                continue
    return features


def _lines(text: str) -> frozenset[str]:
    """The lines of a script, but those of the method itself, of its message and of its imports."""
    body = (line.strip() for line in text.split('"""', 2)[2].splitlines())
    return frozenset(
        line for line in body if line not in _path_lines() and not line.startswith(("MESSAGE", "r", "import", "from"))
    )


@functools.cache
def _path_lines() -> frozenset[str]:
    return frozenset(line.strip() for file in _METHODS.glob("*.py") for line in file.read_text().splitlines())


def _covering(features: Mapping[str, frozenset[str]], covered: Iterable[str] = ()) -> list[str]:
    """Cases that together have every feature that is not covered, the most telling first."""
    chosen, missing = [], frozenset().union(*features.values()).difference(covered)
    while missing:
        chosen.append(max(features, key=lambda case_id: len(features[case_id] & missing)))
        missing -= features[chosen[-1]]
    return chosen


def _run(directory: pathlib.Path, text: str) -> ScriptRun:
    """Runs a script in which a rank that waits for one which raised does not wait as long as a user's."""
    file = directory / "script.py"
    file.write_text(text.replace("threading.Timer(60,", "threading.Timer(20,"))
    return run_script(file)


def test_scripts_end_like_their_cases_with_the_same_exceptions_and_entries(tmp_path: pathlib.Path) -> None:
    """The output of each script is compared from outside with the words of the report."""
    results = {result.id: result for result in _committed().results}
    chosen = _covering(_reported_features())
    assert {results[case_id].verdict.kind for case_id in chosen} >= {"ok", "refused", "wrong", "crash", "poisoned"}
    failures = {}
    for case_id in chosen:
        case, verdict, failure = results[case_id].case, results[case_id].verdict, results[case_id].failure
        run = _run(tmp_path, render_script(case, read_reported(case, _committed())))
        words = f"{verdict.kind}: "
        if find_method(case.method, case.scenario.version).direction == "out":
            if verdict.kind in ("crash", "poisoned") and failure is not None:
                words += f"{failure.type}: {' '.join(failure.message.split(': [(')[0].split())}"
            elif verdict.kind in ("wrong", "misplaced"):
                names, _, more = verdict.reason.partition(": ")[2].partition(" and ")
                words += f"{len(names.split(', ')) + int(more.split()[0])} entries: {names}"
        if run.codes != [0, 0] or words not in " ".join(run.output.split()):
            failures[case_id] = words, run
    assert failures == {}


def test_scripts_of_the_evidence_of_entries_end_as_the_catalogue_says(tmp_path: pathlib.Path) -> None:
    chosen = _covering(_evidence_features(), frozenset().union(*_reported_features().values()))
    assert len(chosen) > 3
    runs = {case_id: _run(tmp_path, render_script(_case(case_id), find_expected(_case(case_id)))) for case_id in chosen}
    assert {case_id: run for case_id, run in runs.items() if run.codes != [0, 0]} == {}


@pytest.mark.parametrize(
    "case_id",
    [
        "fsdp2/none/unstaged/fp32-compute/unshard",
        "fsdp1/policy/unstaged/fp32-compute/full_state_dict",
        "fsdp1/none/unstaged/fresh/fp32-compute/rank_files",
    ],
)
def test_a_script_without_mixed_precision_ends_as_the_case_does(tmp_path: pathlib.Path, case_id: str) -> None:
    text = render_script(_case(case_id), _OK)
    assert "MixedPrecision" not in text
    run = _run(tmp_path, text)
    assert run.codes == [0, 0], run.output


def test_a_script_that_expects_another_end_ends_with_1(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/state_dict.to.full_tensor")
    as_expected = _run(tmp_path, render_script(case, _OK))
    assert (as_expected.codes, as_expected.output.count("ok: PASS")) == ([0, 0], 2)
    assert "not shown" in as_expected.output.splitlines()
    other = Expectation(kind="crash", message="RuntimeError: nothing raises this")
    otherwise = _run(tmp_path, render_script(case, other))
    assert (otherwise.codes, "not shown" in otherwise.output.splitlines()) == ([1, 1], True)


@pytest.mark.parametrize(
    ("case_id", "code", "line"),
    [
        ("fsdp2/none/unstaged/summon_full_params", 1, "shown"),
        ("fsdp2/none/unstaged/state_dict.to.full_tensor", 0, "not shown"),
    ],
)
def test_as_a_test_a_script_ends_with_1_where_it_fails(
    tmp_path: pathlib.Path, case_id: str, code: int, line: str
) -> None:
    run = _run(tmp_path, render_script(_case(case_id), find_expected(_case(case_id)), as_test=True))
    assert (run.codes, line in run.output.splitlines()) == ([code, code], True), run.output


def test_a_script_runs_under_torchrun_as_its_docstring_says(tmp_path: pathlib.Path) -> None:
    """Runs on the CPU, without any code of fsdp-doctor in the process."""
    file = tmp_path / "r.py"
    made = doctor("repro", "fsdp2/none/unstaged/summon_full_params", "--out", str(file))
    assert (made.code, made.stdout) == (0, "")
    assert "torchrun --nproc-per-node 2 r.py" in file.read_text()
    done = torchrun_script(file, tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout.count("wrong: 25 entries: model.embed_tokens.weight") == 2


def test_a_script_that_loads_runs_on_the_cpu_too(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/fresh/dcp.load.model+optimizer")
    file = tmp_path / "script.py"
    file.write_text(render_script(case, find_expected(case)))
    run = run_script(file, device="cpu")
    assert (run.codes, run.output.count("ok: PASS")) == ([0, 0], 2), run.output


_HANG = "fsdp2/none/unstaged/uneven/from_local"
_SHARDED_LOAD = "fsdp2/none/unstaged/fresh/extra-key/load_state_dict.sharded"
_ONE_MOMENT = "        next(iter(optimizer.state.values()))['exp_avg'].mul_(2)"


@pytest.mark.parametrize(
    ("case_id", "expectation", "line", "planted", "output"),
    [
        (_HANG, None, "    loss.backward()", '    raise RuntimeError("planted")', "planted"),
        (
            "fsdp2/none/unstaged/fresh/set_model_state_dict.full",
            _OK,
            "        set_model_state_dict_full(model, state)",
            "        pass",
            "incomplete: 25 entries: model.embed_tokens.weight, ",
        ),
        *(
            (case_id, _OK, call, f"{call}\n{_ONE_MOMENT}", "wrong: 1 entries: ")
            for case_id, call in (
                (
                    "fsdp2/none/unstaged/fresh/set_optimizer_state_dict.full",
                    "        set_optimizer_state_dict_full(model, optimizer, state)",
                ),
                (
                    "fsdp1/none/unstaged/fresh/optim_state_dict_to_load.full",
                    "        load_full_optim_state_dict(model, optimizer, state)",
                ),
            )
        ),
        (
            _SHARDED_LOAD,
            Expectation(kind="ok", message="Unexpected key"),
            "        load_state_dict(model, state)",
            "        state.pop('extra.weight') if dist.get_rank() else None\n        load_state_dict(model, state)",
            "[rank0] crash: RuntimeError: ",
        ),
        (_SHARDED_LOAD, Expectation(kind="crash", message="Unexpected key"), "", "", "[rank0] refused: RuntimeError: "),
    ],
    ids=["no hang", "no load", "a moment", "a moment of FSDP1", "one rank refuses", "every rank refuses"],
)
def test_a_script_does_not_pass_if_the_case_ends_otherwise(
    tmp_path: pathlib.Path, case_id: str, expectation: Expectation | None, line: str, planted: str, output: str
) -> None:
    case = _case(case_id)
    text = render_script(case, expectation or find_expected(case))
    assert not line or text.count(line) == 1
    run = _run(tmp_path, text.replace(line, planted) if line else text)
    assert run.codes == [1, 1], run.output
    assert output in run.output


def test_a_scripts_own_check_does_not_hide_its_race(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/param/unstaged/nonblocking/get_model_state_dict.sharded")
    run = _run(tmp_path, render_script(case, find_expected(case)))
    assert run.codes == [0, 0], run.output
